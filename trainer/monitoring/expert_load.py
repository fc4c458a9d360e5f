"""The number of tokens that choose each expert in a step, and the biases of routers that even it out without a loss of its own.

After a step, a router adds `rate` to the bias of experts with fewer tokens than the mean, and takes it from those with more; the
bias counts in the choice of experts, not in their weights (DeepSeek-V3: arXiv:2412.19437; Wang et al. 2024: arXiv:2408.15664)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.errors import ConfigError
from zeromesh.kernels.tiles import PRESENT
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.models.adapters import adapter_names, is_adapted
from zeromesh.units.plan import experts_of
from zeromesh.zero.hooks import watch_inputs

_BIAS = "e_score_correction_bias"
_IN_WRAPPERS = re.compile(r"\.(base_layer.*|modules_to_save\.[\w-]+)$")  # Where PEFT puts a module that it wraps.
_MOST_NAMED = 64  # experts of all layers whose loads a line of figures has one by one


class ExpertLoads:
    """Counts the tokens that choose each expert in forwards of this rank. With a rate, biases are kept in float32 at least.
    Raises `ConfigError` for a rate other than 0 of a model whose routers have no such bias that is saved with it."""

    def __init__(self, model: nn.Module, mesh: Mesh, bias_rate: float = 0.0) -> None:
        self._mesh, self._rate = mesh, bias_rate
        self._counts: dict[str, Tensor] = {}
        self._biases: dict[str, list[Tensor]] = {}
        self.real: Tensor | bool = False  # The present forward's tokens that count, bool `[rows, length]`; all; none.
        saved = adapter_names(model) if is_adapted(model) else None
        for name, own in experts_of(model).items():
            count = own * mesh.experts.size
            self._counts[name] = torch.zeros(count, dtype=torch.int64, device=mesh.device)
            block = _IN_WRAPPERS.sub("", name).rpartition(".")[0]
            near = model.get_submodule(block).named_buffers(block)
            found = [each for leaf, each in near if leaf.endswith(_BIAS) and (saved is None or leaf in saved)]
            self._biases[name] = [each for each in found if each.numel() == count]
            for each in self._biases[name] if bias_rate else ():  # A small rate would be rounded away.
                each.data = each.to(torch.promote_types(each.dtype, torch.float32))
        self.close = watch_inputs([(name, model.get_submodule(name)) for name in self._counts], self._count)
        """Takes the hooks off the model."""
        rows = mesh.world.gather_integers([len(self._counts), sum(map(len, self._biases.values()))])
        self._has_experts, biases = (sum(row[place] for row in rows) for place in range(2))  # On any stage.
        if bias_rate and not biases:
            which = _BIAS if saved is None else f"{_BIAS} that is saved with adapters, as by modules_to_save"
            why = f"the routers of {type(model).__name__} have no buffer {which}; set it to 0"
            raise ConfigError(why, where="optimizer.expert_bias_rate")

    def _count(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # Recomputation in backward counts no token again.
        if self.real is False or torch._C._current_graph_task_id() >= 0:
            return
        counts, integers = self._counts[name], (torch.int32, torch.int64)  # They come before or behind weights.
        for each in (each for each in (*args, *kwargs.values()) if getattr(each, "dtype", None) in integers):
            counted = (chosen := each.reshape(-1, each.shape[-1])) >= 0  # Others stand for no expert.
            if isinstance(self.real, Tensor):
                self.real = self.real.to(each.device, non_blocking=True)
                real = self.real[:, PRESENT["tokens"]].reshape(-1, 1)
                counted &= real if len(real) == len(chosen) else True  # Others are no tokens of the batch's sequences.
            # The number behind the last expert's is dropped: the size of a selection would be asked of the device.
            counts += torch.bincount(chosen.where(counted, len(counts)).flatten(), minlength=len(counts))[: len(counts)]

    def begin_step(self) -> None:
        for each in self._counts.values():
            each.zero_()

    def of_step(self) -> dict[str, Tensor]:
        """Return the counts of the step over all ranks, float64 `[experts]` on the CPU, by module; all ranks call it."""
        if not self._has_experts:
            return {}
        sums = torch.cat([torch.empty(0), *(each.to("cpu", torch.float64) for each in self._counts.values())])
        self._mesh.peers.all_reduce(sums, "loads of experts")
        own = dict(zip(self._counts, torch.split(sums, list(map(len, self._counts.values()))), strict=True))
        if not self._mesh.shape.divides("blocks"):
            return own
        given = {name: each.tolist() for name, each in own.items() if not self._mesh.peers.index}
        rows = self._mesh.world.gather_json(given, "loads of experts")
        return {name: torch.tensor(load, dtype=torch.float64) for row in rows for name, load in row.items()}

    def update_biases(self, loads: Mapping[str, Tensor]) -> None:
        """Move the biases of this rank's routers towards equal loads."""
        for name, biases in self._biases.items() if self._rate else ():
            for bias in biases:
                bias.add_((self._rate * torch.sign(loads[name].mean() - loads[name])).to(bias).view_as(bias))


def relative_loads(loads: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Return by module the loads as multiples of the mean, of each expert if there are few, else the highest and the lowest."""
    named = sum(map(len, loads.values())) <= _MOST_NAMED
    found = {}
    for name, load in ((name, load) for name, load in loads.items() if load.any()):
        each = (load / load.mean().clamp(min=1.0)).tolist()
        rows = enumerate(each) if named else (("highest", max(each)), ("lowest", min(each)))
        found[name] = {str(number): round(value, 3) for number, value in rows}
    return found
