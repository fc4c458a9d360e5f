"""Checkpoints: Hugging Face model directories that every rank writes its own bytes of, and that any layout loads."""
