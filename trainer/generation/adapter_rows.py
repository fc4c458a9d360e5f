"""`AdapterRows`: an adapter of PEFT for each row of a forward, so that requests for several adapters and their base run together.

Each layer that PEFT has put around another runs PEFT's own forward on the rows of one adapter after the other. Only LoRA's linear
layers differ: their base, which costs most, is computed once for all rows. PEFT's mixed batches (`adapter_names`) are not used:
they take the adapters in the order of a set, which differs between tensor ranks, and pass over modules that not all adapters have.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from zeromesh.errors import ConfigError
from zeromesh.intervals import grouped
from zeromesh.overrides import override
from zeromesh.trainer.models.adapters import CHANGING, import_peft

BASE = "__base__"  # PEFT's name of the model without its adapters.


def why_alone(configs: Mapping[str, Any]) -> str:
    """Return why rows with these adapters, PEFT's configurations by name, change the base for others too; empty if they do not."""
    for name, each in configs.items():
        if str(start := getattr(each, "init_lora_weights", "")).startswith(CHANGING):
            return f"{name} subtracts from the base what it adds (init_lora_weights: {start})"
        if (bias := getattr(each, "bias", "none") or "none") != "none":
            return f"{name} has biases of the base itself (bias: {bias})"
    return ""


class AdapterRows:
    """The adapters of a model by row; none has an effect before `enter`. `model` is placed: its layers are those of this rank."""

    def __init__(self, model: nn.Module) -> None:
        settings: Mapping[str, Any] = getattr(model, "peft_config", {})
        self.names = (*settings, BASE) if settings else ()  # Of the adapters, the active one first, and of the base.
        self.why_alone = why_alone(settings)  # Why all rows have the active adapter; empty where each has its own.
        self.unknown: set[str] = set()
        """Layers that `enter` has found to have no dims of rows and columns, so that nothing says which adapter is for what."""
        self._rows: dict[str, list[int]] = {}
        self._shape = (0, 0)
        outermost = ""
        for name, module in model.named_modules():
            # Layers inside another one are called by it, with the rows that it has chosen.
            if hasattr(module, "_disable_adapters") and not (outermost and name.startswith(outermost)):
                outermost = f"{name}."
                inside = [each for each in module.modules() if hasattr(each, "_disable_adapters")]
                plain, once = module.forward, isinstance(module, import_peft().tuners.lora.Linear)
                module.forward = partial(self._forward, name, plain, inside, once and not module.lora_variant)

    def require(self, adapter: Any, where: str) -> None:
        """Raise `ConfigError`, which begins with `where`, for an adapter that rows cannot have."""
        choices, why = self.names[: 1 if self.why_alone else None], self.why_alone and f", as {self.why_alone}"
        if adapter not in (None, *choices):
            raise ConfigError(f"{where}: no adapter {adapter!r:.60}; there are {', '.join(choices) or 'none'}{why}")

    def enter(self, adapters: Sequence[str | None] = (), shape: tuple[int, int] = (0, 0)) -> None:
        """Give the rows of the next forwards, over ids of `shape` [rows, columns], adapters; None or no entry: the active one."""
        named = enumerate(adapters if self.names else ())
        self._rows, self._shape = grouped((self.names[0] if name is None else name, row) for row, name in named), shape

    def _forward(
        self, name: str, plain: Callable[..., Any], inside: Sequence[Any], once: bool, /, *args: Any, **kwargs: Any
    ) -> Any:
        if len(self._rows) < 2:
            out = _with_adapter(next(iter(self._rows), None), inside, partial(plain, *args, **kwargs))
            if self._rows and (len(args) != 1 or kwargs or not all(map(self._is_by_row, (*args, out)))):
                self.unknown.add(name)
            return out
        (x,) = args
        if kwargs or not self._is_by_row(x):
            raise RuntimeError(f"{name} gets something else than a row for each request, so these cannot have adapters")
        if once:
            return _lora(inside[0], self._rows, x)
        parts = {each: _with_adapter(each, inside, partial(plain, x[rows])) for each, rows in self._rows.items()}
        first = next(iter(parts.values()))
        out = first.new_empty(len(x), *first.shape[1:])
        for adapter, part in parts.items():
            out[self._rows[adapter]] = part
        return out

    def _is_by_row(self, x: Any) -> bool:
        """Return True for ids [rows, columns] and features [rows, columns, features], of all columns or, before a head, one."""
        if not isinstance(x, Tensor) or x.dim() != 2 + x.is_floating_point():
            return False
        return x.shape[0] == self._shape[0] and x.shape[1] in (1, self._shape[1])


def _with_adapter(adapter: str | None, inside: Sequence[Any], run: Callable[[], Any]) -> Any:
    """Return what PEFT's forward, `run`, does with one adapter for all rows; None is the active one."""
    with ExitStack() as undone:
        for each in inside if adapter is not None else ():
            undone.callback(override(each, "_active_adapter", [adapter]))
            undone.callback(override(each, "_disable_adapters", adapter == BASE))
        return run()


def _lora(layer: Any, rows_of: Mapping[str, list[int]], x: Tensor) -> Tensor:
    """Return what PEFT's linear layer with LoRA does, for rows of several adapters."""
    out: Tensor = layer.base_layer(x)
    for name, rows in rows_of.items():
        if name in layer.lora_A:
            part = x[rows].to(layer.lora_A[name].weight.dtype)
            out[rows] += (layer.lora_B[name](layer.lora_A[name](part)) * layer.scaling[name]).to(out.dtype)
    return out
