"""Callbacks: code of the user or of transformers that runs at fixed points of training."""

from zeromesh.trainer.callbacks.callback import Callback

__all__ = ["Callback"]
