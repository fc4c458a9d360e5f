"""Element-wise optimizers on flat shards."""
