"""`from zeromesh.accelerate import Accelerator`: accelerate's class of that name, running on the engine."""

from zeromesh.trainer.integrations.accelerate import Accelerator

__all__ = ["Accelerator"]
