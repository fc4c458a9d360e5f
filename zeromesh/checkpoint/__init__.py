"""Checkpoints: Hugging Face model directories that every rank writes its own bytes of, and that any layout loads.

saver, loader    what all ranks do together: save while training goes on, and load
store            a directory of checkpoints: each appears all at once, and old ones are removed
verify           finds all damage of a checkpoint on disk
io/              from a rank's memory to bytes of files and back
    file_slices      what a rank holds of a tensor, and where elements lie in a file
    write_plan       which bytes each rank writes, also of tensors that ranks divide inside of rows
    writer, reader   move the bytes, with a checksum for each piece
format/          the safetensors files and `manifest.json`
multi_host/      agreement of ranks, and hosts without a shared disk: parts of checkpoints, merging them
"""
