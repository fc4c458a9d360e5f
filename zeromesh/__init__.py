"""zeromesh: a ZeRO-style trainer on PyTorch that is exact, small in memory and fast.

Most users need only `from zeromesh import Trainer`. The engine is in the subpackages of this package, the trainer in
`zeromesh.trainer`, and memory tiers in `zeromesh.offload`."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeromesh.trainer import Callback, FitReport, Generated, Generator, Trainer, TrainerConfig

__version__ = "0.1.0"
_LOOP_NAMES = ("ChainedOptimizer", "averaged", "gathered", "load", "save", "shard", "state_dict", "unshard")
_MODULES = dict.fromkeys(_LOOP_NAMES, "shard") | {"receive_weights": "weights.handoff"}
__all__ = ["Callback", "FitReport", "Generated", "Generator", "Trainer", "TrainerConfig", "__version__", *_MODULES]
# bitsandbytes warns, whoever imports it, that it lacks a package for products of codes, which are not made here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    """Import the trainer's names lazily, so that the engine never imports the layer above it."""
    if name in _MODULES:
        return getattr(import_module(f"zeromesh.trainer.{_MODULES[name]}"), name)
    if name in __all__:
        return getattr(import_module("zeromesh.trainer"), name)
    raise AttributeError(f"module 'zeromesh' has no attribute {name!r}")
