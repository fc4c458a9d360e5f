"""The parameters that are trained, chosen by patterns of names from the configuration."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from zeromesh.errors import ConfigError
from zeromesh.trainer.config.sections.optimizer import require_matches
from zeromesh.trainer.models.adapters import adapter_names, is_adapted


def choose_trained(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train the parameters of `model` that a pattern matches and freeze all others, by their first names; a later pattern counts
    more than an earlier one, and one that begins with ! freezes. Raises `ConfigError` for a pattern that matches none, and for
    weights beside adapters that no file of adapters would have."""
    where = "model.train"
    parameters, beside = dict(model.named_parameters()), adapter_names(model) if is_adapted(model) else None
    require_matches([each.removeprefix("!") for each in patterns], parameters, where)
    for name, parameter in parameters.items():
        matching = [each for each in patterns if fnmatchcase(name, each.removeprefix("!"))]
        trained = bool(matching) and not matching[-1].startswith("!")
        if trained and beside is not None and name not in beside:
            problem = f"{name} is of the base, and saved adapters do not have it; name its module in modules_to_save"
            raise ConfigError(problem, where=where)
        if trained and not parameter.is_floating_point():
            raise ConfigError(f"{name} has {parameter.dtype} numbers, which have no gradients", where=where)
        parameter.requires_grad_(trained)
