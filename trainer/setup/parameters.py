"""The parameters that are trained, and their groups of the optimizer, chosen by patterns of names from the configuration."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from zeromesh.errors import ConfigError
from zeromesh.trainer.config.sections.training import OptimizerSection
from zeromesh.trainer.models.adapters import adapter_names, is_adapted


def choose_trained(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train the parameters of `model` that a pattern matches and freeze all others, by their first names; a later pattern counts
    more than an earlier one, and one that begins with ! freezes. Raises `ConfigError` for a pattern that matches none, and for
    weights beside adapters that no file of adapters would have."""
    where = "model.train"
    parameters, beside = dict(model.named_parameters()), adapter_names(model) if is_adapted(model) else None
    _require_matches([each.removeprefix("!") for each in patterns], parameters, where)
    for name, parameter in parameters.items():
        matching = [each for each in patterns if fnmatchcase(name, each.removeprefix("!"))]
        trained = bool(matching) and not matching[-1].startswith("!")
        if trained and beside is not None and name not in beside:
            problem = f"{name} is of the base, and saved adapters do not have it; name its module in modules_to_save"
            raise ConfigError(problem, where=where)
        if trained and not parameter.is_floating_point():
            raise ConfigError(f"{name} has {parameter.dtype} numbers, which have no gradients", where=where)
        parameter.requires_grad_(trained)


def parameter_groups(
    section: OptimizerSection, parameters: Mapping[str, Tensor], exempt: Collection[str] = ()
) -> dict[tuple[float, float], list[str]]:
    """Return the names of parameters by the factor of their learning rate and their weight decay, which the first of
    `optimizer.groups` that matches says; without another word, those of `exempt` and `no_decay` have none. Raises `ConfigError` for
    a pattern that matches no trained parameter."""
    found = dict[tuple[float, float], list[str]]()
    trained = [name for name, each in parameters.items() if each.requires_grad]
    _require_matches([each for group in section.groups for each in group.patterns], trained, "optimizer.groups")
    for name in parameters:
        group = next((each for each in section.groups if _matches(name, each.patterns)), None)
        decay = 0.0 if name in exempt or _matches(name, section.no_decay) else section.weight_decay
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        found.setdefault((1.0 if group is None else group.lr_factor, decay), []).append(name)
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def _require_matches(patterns: Iterable[str], names: Collection[str], where: str) -> None:
    """Raise `ConfigError` for patterns that match no name, with the names nearest to them."""
    problems, what = [], "parameter" if where == "model.train" else "trained parameter"
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name in names):
            near = sorted(names, key=lambda name: _likeness(pattern, name), reverse=True)[:3]
            problems.append(f"{pattern!r} matches no {what} of the model; nearest: {', '.join(near)}")
    if problems:
        raise ConfigError(problems, where=where)


def _likeness(pattern: str, name: str) -> float:
    """Return how much of a pattern's words is in a name, from 0 to 1."""
    words = pattern.replace("*", ".").strip(".")
    blocks = difflib.SequenceMatcher(None, words, name, autojunk=False).get_matching_blocks()
    return sum(each.size**2 for each in blocks) / max(len(words), 1) ** 2
