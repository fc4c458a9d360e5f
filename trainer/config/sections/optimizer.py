"""The section `optimizer`, and the optimizers that it names: a row for each, any class, and those of transformers' Trainer."""

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from zeromesh.errors import ConfigError, library_errors
from zeromesh.settings import keys
from zeromesh.trainer.config.sections.base import Section, Texts, find_object, nearest

if TYPE_CHECKING:  # A configuration is refused before torch is imported.
    from torch import nn
    from torch.optim import Optimizer

OPTIMIZERS = {
    **{name.lower(): f"torch.optim:{name}" for name in ("AdamW", "Adam", "SGD", "Adagrad", "NAdam", "RAdam")},
    **{name.lower(): f"torch.optim:{name}" for name in ("Adamax", "Adadelta")},
    "muon": f"{__name__}:muon",
    "lion": "bitsandbytes.optim:Lion",
    "lamb": "bitsandbytes.optim:LAMB",
    "adamw_torch_fp8": "torchao.optim:AdamWFp8",
}
"""The optimizers that `optimizer.name` may name beside those of transformers' Trainer and classes of the user's."""
_ADAM = {"betas": (0.9, 0.95), "eps": 1e-8}
_DEFAULTS: dict[str, dict[str, Any]] = {"adamw": _ADAM, "adam": _ADAM, "adagrad": {"eps": 1e-8}}
"""Values of this section, where they are not set, that differ from the class's own."""
_IN_BACKWARD = "it updates each parameter by hooks of its own inside backward, before gradients are summed over ranks"
_REFUSED = {
    "*_layerwise": f"{_IN_BACKWARD}; take the name without _layerwise",
    "*lomo": f"{_IN_BACKWARD}; adamw with optimizer.in_backward: true frees gradients as early",
}
"""Reasons against names of transformers' Trainer, by pattern."""
_TARGETS = "optim_target_modules"
"""The argument of TrainingArguments that says which linear layers low-rank optimizers project."""


class GroupSection(Section):
    """A group of parameters with a learning rate and a weight decay of its own."""

    match: keys.Text | Texts
    """A pattern of names of parameters, or a list of them, such as `*.embed_tokens.*`."""
    lr_factor: keys.NotNegative = 1.0
    """The factor of the learning rate; 0 keeps the values."""
    weight_decay: keys.NotNegative | None = None
    """The weight decay; null: as without the group."""

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.match,) if isinstance(self.match, str) else self.match


class OptimizerSection(Section, keys.OptimizerKeys):  # type: ignore[misc]  # pydantic freezes it too
    """The optimizer. adamw, adam, sgd and adagrad are torch's fused ones, on flat shards."""

    options: Annotated[dict[str, JsonValue], keys.Allowed("a mapping")] = Field(default_factory=dict)
    """Further arguments of the optimizer's class, by their names there."""
    exempt: Literal["none", "biases_and_norms"] = "none"
    """Further parameters without weight decay: none, or the biases and normalisations that transformers' Trainer exempts."""
    groups: Annotated[
        keys.Listed[tuple[GroupSection, ...]], keys.Allowed('a list such as [{match: "*.embed*", lr_factor: 0.1}]')
    ] = ()
    """Parameters with a learning rate or a weight decay of their own, such as `[{match: "*.embed*", lr_factor: 0.1, weight_decay:
    0}]`; the first that matches a parameter counts."""
    expert_bias_rate: keys.NotNegative = 0.0
    """The amount that routers add after each step to the biases of experts with few tokens, and take from others, such as 0.001:
    that balances models with `e_score_correction_bias` without a loss. 0: biases stay."""
    in_backward: bool = False
    """Update each bucket inside backward, which frees its gradient at once. Needs clip_norm 0, on_nonfinite stop and no float16."""

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, values: Any) -> Any:
        name = values.get("name", "adamw") if isinstance(values, dict) else None
        known = _DEFAULTS.get(name, {}) if isinstance(name, str) else {}
        unset = {key: value for key, value in known.items() if values.get(key) is None}
        return {**values, **unset} if unset else values


def optimizer_problems(section: OptimizerSection) -> Iterator[str]:
    """Yield what is wrong with a section that no run could use, before there is a model. Classes of the user's are not imported."""
    torchs = OPTIMIZERS.get(section.name, "").startswith("torch.")
    if ":" not in section.name and (not torchs or section.options):
        try:
            make_optimizer(section, None)
        except ConfigError as error:
            yield str(error)


def make_optimizer(
    section: OptimizerSection, model: "nn.Module | None", exempt: Collection[str] = (), folders: Sequence[str] = ()
) -> "Optimizer":
    """Make the optimizer of a model's floating-point parameters; those that match `no_decay`, or are in `exempt`, have no weight
    decay. None is a tiny model, which only shows whether the section can be used. `folders` are searched for the user's classes.
    Raises `ConfigError` for names and options that do not exist, and for packages that are not installed."""
    from torch import nn
    from torch.optim import Optimizer

    targets = section.options.get(_TARGETS, "all-linear")
    if model is None:
        model, targets = nn.ModuleDict({"embedding": nn.Embedding(2, 4), "linear": nn.Linear(4, 4)}), "all-linear"
        section = section.model_copy(update={"groups": ()})
    make, values, groups = _class_of(section, model, targets, folders)
    kinds, arguments = inspect.Parameter, inspect.signature(make).parameters.values()
    named = [each for each in arguments if each.kind not in (kinds.POSITIONAL_ONLY, kinds.VAR_POSITIONAL)]
    taken = ["**" if each.kind is kinds.VAR_KEYWORD else each.name for each in named]  # ** of one that takes any.
    if "model" in taken:
        values["model"] = model
    groups = _with_arguments(section, taken, values, groups)
    decays, parameters = values.pop("weight_decay", None) is not None, dict(model.named_parameters())
    kinds_of = {
        id(parameters[name]): (factor, decay if decays else None)
        for (factor, decay), names in parameter_groups(section, parameters, exempt).items()
        for name in names
    }
    divided = []
    for group in groups:  # Each has one learning rate, and one weight decay if the class has any.
        for factor, decay in dict.fromkeys(kinds_of[id(each)] for each in group["params"]):
            listed = [each for each in group["params"] if kinds_of[id(each)] == (factor, decay)]
            own = {} if decay is None else {"weight_decay": decay}
            divided.append({**group, "params": listed, "lr": section.lr * factor, **own})
    shown = ", ".join(f"{name}={value!r}" for name, value in values.items() if name != "model")
    with library_errors("optimizer", f"{section.name} cannot be made with {shown}: "):
        made = make(divided, **values)
    if not isinstance(made, Optimizer):
        problem = f"{section.name} gave a {type(made).__name__}; give a class of torch.optim.Optimizer"
        raise ConfigError(problem, where="optimizer.name")
    return made


def _class_of(
    section: OptimizerSection, model: "nn.Module", targets: Any, folders: Sequence[str]
) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """Return the class of a section, the first arguments of its call, and the groups of its parameters."""
    groups: list[dict[str, Any]] = [{"params": [each for each in model.parameters() if each.is_floating_point()]}]
    values: dict[str, Any] = {"lr": section.lr}
    python = OPTIMIZERS.get(section.name, section.name)
    if ":" not in python:
        make, values = _of_transformers(section, model, targets)
        return make, values, values.pop("params", groups)
    package = python.partition(":")[0].partition(".")[0]
    if section.name in OPTIMIZERS and find_spec(package) is None:
        raise ConfigError(f"{section.name} needs the package {package}: pip install {package}", where="optimizer.name")
    return find_object(python, "optimizer.name", folders), values, groups


def _with_arguments(
    section: OptimizerSection, taken: Collection[str], values: dict[str, Any], groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Add the section's keys and options, if they are `taken`, to `values` or to the groups that have them; returns the groups."""
    given: dict[str, Any] = {"weight_decay": section.weight_decay}
    given |= {name: value for name in ("betas", "eps") if (value := getattr(section, name)) is not None}
    given |= {"momentum": section.momentum} if section.momentum else {}
    for name, value in given.items():
        if {name, "**"} & {*taken}:
            values.setdefault(name, value)
        elif value and name not in values:
            cure = "set it to 0" if name == "weight_decay" else "leave it out"
            raise ConfigError(f"{section.name} takes no {name}; {cure}", where=f"optimizer.{name}")
        if name in section.options and name != "weight_decay":
            raise ConfigError(f"{name} is optimizer.{name} too; leave one of them out", where="optimizer.options")
    of_groups = {name for group in groups for name in group} - {"params"}
    allowed = {*taken, *of_groups, *([_TARGETS] if of_groups else ())} - {"params", "model", "lr", "weight_decay"}
    for name, value in section.options.items():
        if name not in allowed and (name in ("lr", "weight_decay") or "**" not in taken):
            why = f"{section.name} takes no {name!r} here; allowed are {', '.join(sorted(allowed - {'**'}))}"
            raise ConfigError(f"{why}, beside optimizer.lr and optimizer.weight_decay", where="optimizer.options")
        plain = tuple(value) if isinstance(value, list) else value
        if name in of_groups:
            groups = [{**group, name: plain} if name in group else group for group in groups]
        elif name != _TARGETS or not of_groups:  # Groups follow from it.
            values[name] = plain
    return groups


def muon(
    params: Collection[dict[str, Any]],
    *,
    model: "nn.Module",
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    ns_steps: int = 5,
    adjust_lr_fn: str = "match_rms_adamw",
) -> "Optimizer":
    """Make torch's Muon for matrices (Jordan et al., 2024), and AdamW, with `betas` and `eps`, for embeddings, the output head and
    what is no matrix. One learning rate fits both by the default of `adjust_lr_fn`, as in Liu et al., "Muon is Scalable for LLM
    Training", 2025. The other arguments are those of torch's Muon, with its defaults."""
    from torch import nn
    from torch.optim import AdamW, Muon

    from zeromesh.units.plan import embedding_of
    from zeromesh.zero.sharded_optimizer import ChainedOptimizer

    head = embedding_of(model, "output")
    kept = [each for each in model.modules() if isinstance(each, nn.Embedding) or each is head]
    tables = {id(parameter) for module in kept for parameter in module.parameters()}

    def part(*, matrices: bool) -> list[dict[str, Any]]:
        """Return the groups with their matrices alone, or with their other parameters; none that is empty."""
        divided = [
            (group, [each for each in group["params"] if (each.dim() == 2 and id(each) not in tables) == matrices])
            for group in params
        ]
        return [{**group, "params": listed} for group, listed in divided if listed]

    layers, others = part(matrices=True), part(matrices=False)
    common: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    own: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
    own |= {"ns_coefficients": ns_coefficients, "adjust_lr_fn": adjust_lr_fn}
    made: list[Optimizer] = [Muon(layers, **common, **own)] if layers else []
    made += [AdamW(others, **common, betas=betas, eps=eps)] if others else []
    return ChainedOptimizer(*made)


def _of_transformers(section: OptimizerSection, model: "nn.Module", targets: Any) -> tuple[Any, dict[str, Any]]:
    """Return the class and its arguments as transformers' Trainer chooses them for a name of its `optim`."""
    from torch import nn
    from transformers import Trainer
    from transformers.training_args import OptimizerNames, TrainingArguments

    name, names = section.name, [each.value for each in OptimizerNames]
    if name not in names:
        near = nearest(name, [*OPTIMIZERS, *names])
        rest = "a name of transformers' optim such as adafactor, or a class such as package.module:Class"
        rest += f"; did you mean {near}?" if near else ""
        raise ConfigError(f"got {name[:40]!r}; allowed are {', '.join(OPTIMIZERS)}, {rest}", where="optimizer.name")
    if reason := next((why for pattern, why in _REFUSED.items() if fnmatchcase(name, pattern)), ""):
        raise ConfigError(f"{name} is not available: {reason}", where="optimizer.name")
    defaults = {each: field.default for each, field in TrainingArguments.__dataclass_fields__.items()}
    first, second = section.betas or (defaults["adam_beta1"], defaults["adam_beta2"])
    given = {"optim": OptimizerNames(name), "learning_rate": section.lr, "weight_decay": section.weight_decay}
    given |= {"adam_beta1": first, "adam_beta2": second, _TARGETS: targets, "optim_args": None, "warmup_steps": 0}
    given |= {} if section.eps is None else {"adam_epsilon": section.eps}
    arguments: Any = SimpleNamespace(**{**defaults, **given, "parallel_mode": None})
    with library_errors("optimizer.name", f"{name}: "):
        make, values = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    for each in [each for each in model.modules() if isinstance(each, nn.Embedding)]:
        if values.get("optim_bits") == 8:
            vars(each.weight)["optim_overrides"] = {"optim_bits": 32}
    return make, values


def parameter_groups(
    section: OptimizerSection, parameters: Mapping[str, Any], exempt: Collection[str]
) -> dict[tuple[float, float], list[str]]:
    """Return the names of parameters by the factor of their learning rate and their weight decay, as the first group that matches
    says, or else none for `exempt` and `no_decay`. Raises `ConfigError` for a pattern that matches no trained parameter."""
    found = dict[tuple[float, float], list[str]]()
    trained = [name for name, each in parameters.items() if each.requires_grad]
    require_matches([each for group in section.groups for each in group.patterns], trained, "optimizer.groups")
    for name in parameters:
        group = next((each for each in section.groups if _matches(name, each.patterns)), None)
        decay = 0.0 if name in exempt or _matches(name, section.no_decay) else section.weight_decay
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        found.setdefault((1.0 if group is None else group.lr_factor, decay), []).append(name)
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def require_matches(patterns: Iterable[str], names: Collection[str], where: str) -> None:
    """Raise `ConfigError` for patterns that match no name, with the names nearest to them."""
    problems, what = [], "trained parameter" if where == "optimizer.groups" else "parameter"
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name in names):
            near = sorted(names, key=lambda name: _likeness(pattern, name), reverse=True)[:3]
            problems.append(f"{pattern!r} matches no {what} of the model; nearest: {', '.join(near)}")
    if problems:
        raise ConfigError(problems, where=where)


def _likeness(pattern: str, name: str) -> float:
    """Return how much of a pattern's words is in a name, from 0 to 1."""
    words = pattern.replace("*", ".").strip(".")
    blocks = SequenceMatcher(None, words, name, autojunk=False).get_matching_blocks()
    return sum(each.size**2 for each in blocks) / max(len(words), 1) ** 2
