"""User models and loops, each equal to a plain PyTorch loop or refused by name."""
