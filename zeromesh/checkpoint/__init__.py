"""Checkpoints: Hugging Face model directories that every rank writes its own bytes of, and that any layout loads.

saver, loader    what all ranks do together: save while training goes on, and load
store            a directory of checkpoints: each appears all at once, and old ones are removed
shared_storage   which ranks see one directory; hosts without a shared disk have parts of checkpoints (parts: reading, merging)
verify           finds all damage of a checkpoint on disk
io/              from a rank's memory to bytes of files and back
    file_slices      what a rank holds of a tensor, and where elements lie in a file
    row_exchange     what tensor ranks hold of columns of a tensor becomes rows
    write_plan       which bytes each rank writes
    writer, reader   move the bytes, with a checksum for each piece
format/          the safetensors files and `manifest.json`
"""
