"""The trial, on a small copy, that a model divided by shapes or by a user's rules computes the same results."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zeromesh.errors import ConfigError, LayoutError
from zeromesh.tensor.plan.planner import plan_tensor
from zeromesh.tensor.plan.recognition import goes_by_shape, recognised
from zeromesh.tensor.trial import difference_when_divided
from zeromesh.trainer.models.small_copy import ERRORS, InFloat64, small_copy, vary
from zeromesh.trainer.models.user_model import integer, positive, text_part
from zeromesh.zero.hooks import tensors_in

_RANKS, _LENGTH, _FIRST_ID = 2, 8, 3
_Value = TypeVar("_Value")


def require_equal_when_divided(model: nn.Module, rules: Mapping[str, str], *, sequence: bool) -> None:
    """Run a small copy of a model whole and divided over two ranks; outputs and gradients must agree.

    `rules` are the user's. A model with a plan of its own, of which no small copy runs, is not tried. With `sequence`, blocks
    exchange shards of the sequence. Raises `ConfigError` with the module that differs, or if division by shape could not be tried.
    """
    by_shape = goes_by_shape(model)
    if not by_shape and not rules and not getattr(model, "tp_plan", None):
        return
    plan = _by_pattern(recognised(model)) if by_shape else {}
    given: dict[str, Any] = {}

    def run(each: Any) -> list[Tensor]:
        with InFloat64():
            return [out for out in tensors_in(each(**given)) if out.is_floating_point()]

    @torch.no_grad()
    def check(each: nn.Module) -> Tensor:
        given.update(_inputs(each))
        try:
            outputs = run(each)
        except ERRORS:
            if not (given.pop("pixel_values", None) is not None and "input_ids" in given):
                raise
            outputs = run(each)  # A model of text and pictures, with text alone.
        if missing := next(iter(plan.keys() - _by_pattern(dict(each.named_modules()))), ""):
            raise LayoutError(f"it has no {missing}")
        return torch.cat([out.flatten() for out in outputs])

    small = small_copy(model, check)
    if isinstance(small, str):
        if rules or not plan:
            return
        raise ConfigError(_refused(model, f"no small copy of it could be tried ({small})"), where="parallel.tensor")
    vary(small)
    if found := _unlike(model, small, plan) if by_shape else "":
        raise ConfigError(_refused(model, found), where="parallel.tensor")
    for shares in dict.fromkeys((sequence, False)):
        try:
            divided, inside = plan_tensor(small, _RANKS, rules), bool(plan or rules)
            found = difference_when_divided(small, divided, run, sequence=shares, inside=inside)
        except LayoutError as error:
            found = str(error)
            continue
        if found:
            raise ConfigError(_refused(model, found), where="parallel.plan" if rules else "parallel.tensor")
        return
    if plan and not rules:
        raise ConfigError(_refused(model, f"the copy could not be divided ({found})"), where="parallel.tensor")


def _by_pattern(named: Mapping[str, _Value]) -> dict[str, _Value]:
    """Give values by names with `*` for the numbers of blocks, of which a copy has fewer."""
    return {re.sub(r"\.\d+(?=\.)", ".*", name): value for name, value in named.items()}


def _unlike(model: nn.Module, small: nn.Module, plan: Mapping[str, str]) -> str:
    """Say how a copy that has run differs from the model, so that it proves nothing for it; an empty text if it does not."""
    kinds, copied = (
        {(*_by_pattern({name: ""}), type(each).__name__) for name, each in one.named_modules()}
        for one in (model, small)
    )
    for name, kind in sorted(copied - kinds):
        return f"its forward puts a {kind} in the place of {name}"
    others = _by_pattern(recognised(small))
    unlike = next((name for name in (*plan, *others) if plan.get(name) != others.get(name)), "")
    return f"its sizes do not tell how {unlike} is to be divided" if unlike else ""


def _refused(model: nn.Module, reason: str) -> str:
    return (
        f"{type(model).__name__} would be divided by a plan, by the shapes of its layers or by your rules, and in a trial on a "
        f"small copy {reason}; give rules under which it computes the same (parallel.plan), or set parallel.tensor: 1"
    )


def _inputs(small: Any) -> Iterator[tuple[str, Any]]:
    """Yield fixed arguments of a forward for two samples: tokens, pictures or sound."""
    config, names = small.config, inspect.signature(type(small).forward).parameters
    generator = torch.Generator().manual_seed(0)
    main = getattr(small, "main_input_name", "input_ids")
    text, vision = (
        text_part(config),
        getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config,
    )
    most = positive(text, "vocab_size") or 2 * _FIRST_ID
    ids = torch.randint(_FIRST_ID, most, (2, _LENGTH), generator=generator)
    ids[:, -1] = integer(text, "eos_token_id") or ids[0, -1]
    if main == "input_ids" or (config.model_type.startswith(("clip", "siglip", "metaclip")) and "input_ids" in names):
        yield "input_ids", ids
    if config.is_encoder_decoder or (main != "input_ids" and "decoder_input_ids" in names):
        yield "decoder_input_ids", ids[:, :6]
    sizes: dict[str, tuple[int, ...]] = {}
    if "pixel_values" in names and (main == "pixel_values" or vision is not config):
        size = getattr(vision, "image_size", 32)
        picture = (getattr(vision, "num_channels", 3), *(size if isinstance(size, list | tuple) else (size, size)))
        frames = positive(config, "num_frames")
        sizes["pixel_values"] = (frames, *picture) if frames else picture
    elif main == "input_values":
        bins = positive(config, "num_mel_bins")
        sizes[main] = (config.max_length, bins) if bins and hasattr(config, "max_length") else (3200,)
    elif main == "input_features":
        bands = positive(config, "num_mel_bins", "input_feat_per_channel", "feature_size")
        whisper = positive(config, "num_mel_bins") > 0
        sizes[main] = (bands, 2 * config.max_source_positions) if whisper else (64, bands)
    for name, shape in sizes.items():
        yield name, torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    if "use_cache" in names:
        yield "use_cache", False
