"""The user's model: unwrapping, checks against the layout, and the fields that its forward accepts."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zeromesh.errors import ConfigError, DataError
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.trainer.models.adapters import pretrained_of, require_adapters_fit
from zeromesh.units.plan import embedding_of
from zeromesh.weight_init.weight_sources import hooked_parameters, is_pretrained_model

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]  # as `torch.compile` is


def unwrap(model: nn.Module) -> tuple[nn.Module, Compile | None]:
    """Return the model inside `torch.compile` and `DataParallel`, and the wrapper's compile function with its options, or None.
    Raises `ConfigError` for `DistributedDataParallel`, which would reduce gradients a second time, and for compiled submodules."""
    compile_: Compile | None = None
    inside: Any = model
    while True:
        if _is_compiled(inside):
            compile_, inside = inside.dynamo_ctx, inside._orig_mod
        elif isinstance(inside, DistributedDataParallel):
            raise ConfigError("model is a DistributedDataParallel, which reduces gradients itself; give its .module")
        elif isinstance(inside, DataParallel):
            inside = inside.module
        else:
            break
    if parts := [name for name, module in inside.named_modules() if _is_compiled(module)]:
        why = f"{', '.join(parts[:3])}: torch.compile was applied to a part, and parameters are gathered around blocks"
        raise ConfigError(f"{why}; give the model as it is and set model.compile: true, which compiles each block")
    return inside, compile_


def source_of(model: Any) -> str | None:
    """Return the directory or repository that a transformers model was loaded from, or None if unknown."""
    inside = pretrained_of(unwrap(model)[0]) if isinstance(model, nn.Module) else None
    name = getattr(getattr(inside, "config", None), "name_or_path", None)
    return str(name) if name else None


def _is_compiled(model: Any) -> bool:
    # Importing the class takes a second, so its name is compared.
    return type(model).__name__ == "OptimizedModule" and isinstance(getattr(model, "_orig_mod", None), nn.Module)


def require_layout_fits(model: nn.Module, mesh: MeshShape, *, trains: bool) -> None:
    """Raise `ConfigError` for a model that this mesh cannot run or, if `trains`, cannot train. Data ranks gather layers together:
    one that drops a layer at random (LayerDrop, Fan et al., 2020) would block the others."""
    require_adapters_fit(model, mesh.pipeline)
    divides, data = mesh.divides("layers") or mesh.divides("blocks"), mesh.world_size // mesh.model_size
    if divides and (hooked := hooked_parameters(model)):
        why = "under parallel.tensor or parallel.pipeline a rank has but a part of parameters and gradients"
        raise ConfigError(f"{hooked[0]} has a hook on its gradient, and {why}; set both to 1, or take the hook off")
    inside = pretrained_of(model) if trains and data > 1 else None
    values = {} if inside is None else dict(numbers(inside.config.to_dict()))
    if drops := {name: value for name, value in values.items() if name.endswith("layerdrop") and value > 0}:
        dropped = (f"{name.rpartition('.')[2]} is {value}" for name, value in drops.items())
        why = f"{', '.join(dropped)}: each of {data} data ranks would leave out other layers, and they gather layers together"
        raise ConfigError(f"{why}; set it to 0 in the model's configuration, or train on one rank", where="model.config")


def numbers(values: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a model's configuration by dotted name, nested ones included; True and False are 1 and 0."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{path}{name}.")
        elif isinstance(value, int | float):
            yield f"{path}{name}", value


_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardInputs:
    """The fields that the forward of `model`, a class' name, takes from a batch."""

    model: str
    fields: frozenset[str] | None  # Fields that forward accepts; None accepts any.
    named: frozenset[str]  # Names of the parameters of forward.
    required: tuple[str, ...]
    vocab_size: int | None  # Rows of the input embedding, an upper bound of token ids; None if unknown.
    positions: int | None  # The most tokens of a sequence (`max_position_embeddings`); None if unlimited or unknown.

    @classmethod
    def of(cls, model: nn.Module, *, users_loss: bool) -> "ForwardInputs":
        """Read the fields that `model` accepts; with a user's loss function, all fields pass."""
        pretrained = pretrained_of(model)
        model = model if pretrained is None else pretrained  # Adapters pass their inputs to the base model.
        parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
        named = frozenset(each.name for each in parameters if each.kind in _KEYWORD_KINDS)
        fields: frozenset[str] | None = named
        anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        # A Hugging Face forward passes unknown keywords on, with or without effect; transformers' Trainer drops them.
        if users_loss or (anything and not (pretrained is not None and fields)):
            fields = None
        required = [each.name for each in parameters if each.kind in _KEYWORD_KINDS and each.default is each.empty]
        main = getattr(model, "main_input_name", None)
        if pretrained is not None and fields and main in fields and main not in required:
            required.insert(0, main)  # all arguments of a Hugging Face forward have defaults
        config = getattr(model, "config", None) if is_pretrained_model(model) else None
        embedding = embedding_of(model, "input")
        return cls(
            model=type(model).__name__,
            fields=fields,
            named=named,
            required=() if users_loss else tuple(required),
            vocab_size=embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None,
            positions=max(0, positive(text_part(config), "max_position_embeddings") - first_position(model)) or None,
        )

    def check(self, batch: Mapping[str, Any]) -> None:
        """Raise `DataError` for a batch that lacks a required field or is longer than the model's positions."""
        missing = [name for name in self.required if name not in batch]
        if missing and not ("inputs_embeds" in batch and missing == ["input_ids"]):
            why = f"{self.model}.forward needs {', '.join(missing)}, and the batch has {', '.join(batch) or 'nothing'}"
            cure = "name the dataset's fields after the arguments of forward, or pass a data_collator or compute_loss"
            raise DataError(f"{why}; {cure}")
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.ndim > 1:
            self.check_length(ids.shape[-1], "cut the samples")

    def check_length(self, length: int, cure: str) -> None:
        if self.positions is not None and length > self.positions:
            why = f"sequences of {length} tokens are longer than the {self.positions} positions of {self.model}"
            raise DataError(f"{why} (max_position_embeddings of its configuration); {cure}, or build the model with more positions")


def first_position(model: nn.Module) -> int:
    """Return the position of the first token: RoBERTa and its like count from the one behind that of padding, others from 0."""
    embeddings = (each for name, each in model.named_modules() if name.endswith("position_embeddings"))
    return next((each.padding_idx + 1 for each in embeddings if getattr(each, "padding_idx", None) is not None), 0)


def text_part(config: Any) -> Any:
    """Return the text part of a Hugging Face configuration, or the whole without a single one."""
    try:
        return config.get_text_config()
    except (AttributeError, ValueError):
        return config


def integer(config: Any, name: str) -> int | None:
    """Return a configuration value that is one integer for the whole model, or None."""
    try:
        value = getattr(config, name, None)
    except (AttributeError, ValueError, RuntimeError):  # it differs from layer to layer
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def positive(config: Any, *names: str) -> int:
    """Return the first of these attributes that is a positive integer, else 0."""
    return next((value for value in (integer(config, name) or 0 for name in names) if value > 0), 0)
