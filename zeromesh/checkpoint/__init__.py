"""Checkpoints: Hugging Face model directories that every rank writes its own bytes of, and that any layout loads.

saver            saving by all ranks while training goes on
loader           loading by all ranks, also from the parts of hosts without a shared disk, and merging of parts
store            a directory of checkpoints: atomic creation, and removal of old ones
io/              transfers between a rank's memory and files
    file_slices      a rank's parts of tensors, and the file places of their elements
    writer           assignment of bytes to ranks, and transfer with a checksum for each piece
    reader           verified reading of pieces, reading of plain model directories, and all damage on disk
format/          the safetensors files and `manifest.json`
"""
