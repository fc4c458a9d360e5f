"""`from zeromesh.accelerate import Accelerator`: accelerate's own, with the engine under its loops."""

from zeromesh.trainer.integrations.accelerate import Accelerator

__all__ = ["Accelerator"]
