"""Checkpoints: Hugging Face model directories that every rank writes its own bytes of, and that any layout loads.

saver, loader    collective operations: saving while training goes on, and loading
store            a directory of checkpoints: atomic creation, and removal of old ones
shared_storage   groups of ranks that see one directory
parts            checkpoints in parts, by hosts without a shared disk: reading and merging
verify           finds all damage of a checkpoint on disk
io/              transfers between a rank's memory and files
    file_slices      a rank's parts of tensors, and the file places of their elements
    row_exchange     exchange of columns for rows between tensor ranks
    write_plan       assignment of bytes to ranks
    writer, reader   transfers of the bytes, with a checksum for each piece
format/          the safetensors files and `manifest.json`
"""
