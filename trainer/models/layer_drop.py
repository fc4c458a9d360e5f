"""Models that leave layers out at random (LayerDrop, Fan et al., 2020): every rank would leave out others."""

from __future__ import annotations

from typing import Any

from torch import nn

from zeromesh.errors import ConfigError
from zeromesh.trainer.models.peft import pretrained_of

_NAMES = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "speech_encoder_layerdrop")


def require_no_layer_drop(model: nn.Module, data_ranks: int) -> None:
    """Raise `ConfigError` for a model that leaves layers out, on more than one data rank.

    Ranks gather layers and sum gradients together. One that leaves a layer out would have the others wait for it.
    """
    inside = pretrained_of(model)
    if inside is None or data_ranks == 1:
        return
    found = [
        f"{prefix}{name} is {value}"
        for prefix, config in _configs(inside.config)
        for name in _NAMES
        if isinstance(value := vars(config).get(name), int | float) and value > 0
    ]
    if found:
        raise ConfigError(
            f"{', '.join(found)}: each of {data_ranks} data ranks would leave out other layers, and they gather layers together; "
            "set it to 0 in the model's configuration, or train on one rank",
            where="model.config",
        )


def _configs(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """A configuration and those inside it, with what their fields' names begin with."""
    found = [(prefix, config)]
    for name, value in vars(config).items():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            found += _configs(value, f"{prefix}{name}.")
    return found
