"""Checkpoints: Hugging Face model directories that every rank writes its own bytes of, and that any layout loads.

`regions` and `blocks` are integer arithmetic, `tensor_files` and `manifest` the formats, `writer` and `reader` move bytes between
memory and files, `store` makes a directory appear all at once, `saver` and `loader` are what ranks do together.
"""
