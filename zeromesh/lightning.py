"""`from zeromesh.lightning import ZeromeshStrategy`: the engine under Lightning's Trainer."""

from zeromesh.trainer.integrations.lightning import ZeromeshStrategy

__all__ = ["ZeromeshStrategy"]
