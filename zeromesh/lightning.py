"""`from zeromesh.lightning import ZeromeshStrategy`: a strategy for Lightning's Trainer, running on the engine."""

from zeromesh.trainer.integrations.lightning import ZeromeshStrategy

__all__ = ["ZeromeshStrategy"]
