"""Attention of transformers' models over batches whose sequences pack several documents."""
