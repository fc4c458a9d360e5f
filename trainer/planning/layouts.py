"""Layouts, which distribute a run over ranks and memory tiers, and their enumeration for a number of ranks. Arithmetic alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from zeromesh.offload import TierChoice
from zeromesh.offload.tiers import TierName
from zeromesh.options import STAGES, Placement
from zeromesh.pipeline.schedule import ScheduleName
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.models.prepare import Mode

_HERE = TierChoice()
TIERS = ("optimizer", "parameters", "activations")
FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""The candidate fractions of states that are offloaded."""
MICROS = (1, 2, 4, 8, 16, 32, 64)
"""The candidate microbatch sizes, in samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to distribute a run. `accumulation` is derived: the microbatches of a rank in a step."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: bool = False
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    stage: int = 3
    micro: int = 1
    accumulation: int = 1
    recompute: Mode = "none"
    prefetch: int = 1
    """The number of units gathered ahead at stage 3."""
    optimizer: TierChoice = _HERE
    """The tier of master weights, moments and gradient shards."""
    parameters: TierChoice = _HERE
    activations: TierChoice = _HERE

    @property
    def ranks(self) -> int:
        """The number of ranks of the mesh."""
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """The number of data-parallel ranks."""
        return self.replicate * self.shard

    @property
    def gathers(self) -> bool:
        """True if parameters are gathered around their use, and so can be offloaded between uses."""
        return STAGES[self.stage].parameters is Placement.SHARDED

    def keys(self) -> dict[str, Any]:
        """Return the configuration keys of this layout, with their values."""
        return {
            **{f"parallel.{axis}": getattr(self, axis) for axis in ("pipeline", "replicate", "shard", "tensor")},
            "parallel.sequence": self.sequence,
            "parallel.schedule": self.schedule,
            "parallel.chunks": self.chunks,
            "zero.stage": self.stage,
            "zero.prefetch": self.prefetch,
            "batch.micro_size": self.micro,
            "model.activation_checkpointing": self.recompute,
            **{f"offload.{name}": _key_of(getattr(self, name)) for name in TIERS},
        }

    def __str__(self) -> str:
        axes = [f"{axis} {getattr(self, axis)}" for axis in ("pipeline", "replicate", "shard", "tensor")]
        parts = [" x ".join(each for each in axes if not each.endswith(" 1")) or "1 rank", f"stage {self.stage}"]
        parts.append(f"micro {self.micro} x {self.accumulation}")
        if self.pipeline > 1:
            parts.append(self.schedule.replace("_", " ") + (f" {self.chunks}" if self.chunks > 1 else ""))
        if self.sequence:
            parts.append("sequence")
        if self.recompute != "none":
            parts.append("recomputed" if self.recompute == "block" else "partly recomputed")
        if self.gathers and not self.prefetch:
            parts.append("nothing gathered ahead")
        for name in TIERS:
            choice: TierChoice = getattr(self, name)
            if choice.away:
                share = "" if choice.fraction == 1 else f" {choice.fraction:.0%}"
                parts.append(f"{name}{share} on {choice.tier}")
        return ", ".join(parts)


def _key_of(choice: TierChoice) -> Any:
    return choice.tier if choice.fraction == 1 else {"tier": choice.tier, "fraction": choice.fraction}


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The values that fields of layouts may take. `fixed` has the fields of `Layout` that the user has set."""

    ranks: int
    host: int
    """The number of ranks per host."""
    samples: int
    """The number of samples of a global batch."""
    blocks: int
    """The number of blocks that a pipeline can divide into stages; 0: none."""
    tensors: Sequence[int]
    """The numbers of tensor ranks that the model allows."""
    sequence: bool = True
    """True if blocks support sequence parallelism."""
    recompute: bool = True
    """True if blocks can be recomputed."""
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def layouts(self) -> Iterator[Layout]:
        """Yield every layout without offload, those with fewer tensor ranks and stages first."""
        for tensor, pipeline in product(self.tensors, self._pipelines()):
            rest, odd = divmod(self.ranks, tensor * pipeline)
            if odd or tensor > self.host:
                continue
            for replicate in self._replicas(rest, tensor):
                yield from self._of_mesh(tensor, pipeline, replicate, rest // replicate)

    def _of_mesh(self, tensor: int, pipeline: int, replicate: int, shard: int) -> Iterator[Layout]:
        data = replicate * shard
        given = {name: self.fixed[name] for name in (*TIERS, "prefetch") if name in self.fixed}
        modes: tuple[Mode, ...] = ("none", "selective", "block") if self.recompute else ("none",)
        if self.recompute and given.get("activations", _HERE).away:
            modes = modes[1:]
        stages = (0, 1, 2, 3) if shard > 1 else (1,)
        stages = (3,) if given.get("parameters", _HERE).away else stages
        micros = [size for size in MICROS if size * data <= self.samples] or [1]
        for stage, micro, recompute in product(
            self._given("stage", stages), self._given("micro", micros), self._given("recompute", modes)
        ):
            accumulation = -(-self.samples // (micro * data))
            for schedule, chunks in self._schedules(pipeline, accumulation):
                yield Layout(
                    pipeline=pipeline,
                    replicate=replicate,
                    shard=shard,
                    tensor=tensor,
                    sequence=self.fixed.get("sequence", tensor > 1 and self.sequence),
                    schedule=schedule,
                    chunks=chunks,
                    stage=stage,
                    micro=micro,
                    accumulation=accumulation,
                    recompute=recompute,
                    **given,
                )

    def shorter(self, layout: Layout, tiers: Sequence[TierName]) -> Iterator[Sequence[dict[str, Any]]]:
        """Yield for each kind of state that can be offloaded the changes of a layout, in order of decreasing bytes on the device.
        Parameters are offloaded at stage 3 alone, which on one rank of the shard axis equals the others."""
        parts = [TierChoice(tier=tier, fraction=fraction) for tier in tiers for fraction in FRACTIONS]
        if "optimizer" not in self.fixed:
            yield [{}, *({"optimizer": choice} for choice in parts)]
        if "activations" not in self.fixed and layout.recompute != "none":
            yield [{}, *({"activations": choice} for choice in parts[3::4])]
        if layout.gathers or (layout.shard == 1 and "stage" not in self.fixed):
            if "parameters" not in self.fixed:
                yield [{}, *({"parameters": choice, "stage": 3} for choice in parts[1::2])]
            if "prefetch" not in self.fixed:
                yield [{}, {"prefetch": 0}]

    def _given(self, name: str, choices: Iterable[Any]) -> Iterable[Any]:
        return (self.fixed[name],) if name in self.fixed else choices

    def _pipelines(self) -> list[int]:
        if "pipeline" in self.fixed:
            return [self.fixed["pipeline"]]
        return [size for size in divisors(self.ranks) if size == 1 or size <= self.blocks]

    def _replicas(self, data: int, tensor: int) -> list[int]:
        """Return the numbers of replicas to try: one, one on each host, or one on each group of 8 hosts."""
        if "replicate" in self.fixed or isinstance(self.fixed.get("shard"), int):
            wanted = self.fixed.get("replicate", 1)
            shard = self.fixed.get("shard", "auto")
            if shard != "auto" and "replicate" not in self.fixed:
                wanted = data // shard if data % shard == 0 else 0
            fits = wanted and data % wanted == 0 and shard in ("auto", data // wanted)
            return [wanted] if fits else []
        inside = max(1, self.host // tensor)
        sizes = {data // size for size in (inside, 8 * inside) if data % size == 0 and size < data}
        return [1, *sorted(sizes - {1})]

    def _schedules(self, pipeline: int, accumulation: int) -> Iterator[tuple[ScheduleName, int]]:
        if pipeline == 1:
            yield "1f1b", 1
            return
        chunks = [size for size in (2, 4, 8) if size * pipeline <= self.blocks and accumulation >= pipeline]
        every: list[tuple[ScheduleName, int]] = [("1f1b", 1), ("zero_bubble", 1), *(("interleaved", n) for n in chunks)]
        if "schedule" in self.fixed:
            every = [(self.fixed["schedule"], self.fixed.get("chunks", 1))]
        yield from every


NAMES = frozenset(each.name for each in fields(Layout)) - {"accumulation"}
"""The fields of a layout that a user can set."""
FIELDS: dict[str, str] = {key: key.rpartition(".")[2] for key in dict(Layout().keys())} | {
    "zero.stage": "stage",
    "batch.micro_size": "micro",
    "model.activation_checkpointing": "recompute",
}
"""The field of a layout for each configuration key that a layout decides."""


def with_layout(config: TrainerConfig, layout: Layout, free: Collection[str] = FIELDS.keys()) -> TrainerConfig:
    """Return the configuration with the keys of `free` set by a layout, and no `auto` left."""
    changes: dict[str, dict[str, Any]] = {"parallel": {"auto": ()}}
    for key, value in layout.keys().items():
        if key in free:
            section, _, name = key.partition(".")
            changes.setdefault(section, {})[name] = value
    sections = {}
    for name, values in changes.items():
        section = getattr(config, name)
        given = {key: getattr(section, key) for key in section.model_fields_set}
        sections[name] = type(section).model_validate(given | values)
    return config.model_copy(update=sections)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]
