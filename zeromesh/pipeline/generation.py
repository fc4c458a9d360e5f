"""Runs the forward of a staged model for a token generation loop; each stage keeps the keys and values of its own blocks."""

import copy
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

import torch

from zeromesh.errors import DataError, LayoutError
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.pipeline.executor import Executor
from zeromesh.pipeline.schedule import Action, PipelineSchedule
from zeromesh.pipeline.stages.build import Stages

CACHE = "past_key_values"
_BY_ROW = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


@dataclass(slots=True)
class StagedForward:
    """The forward calls of one generation: the first takes the prompts, each later one the new tokens if keys and values are
    cached. Rows are split into the microbatches of `schedule`, to keep all ranks busy. Every rank runs the same loop and receives
    the same logits, so that all choose the same tokens. `call` calls the whole model, on the last stage."""

    executor: Executor
    stages: Stages
    schedule: PipelineSchedule
    call: Callable[..., Any]
    _caches: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Caches by chunk and microbatch, since stubs in one chunk store entries for another's blocks. The first is the caller's."""
    _logit: tuple[int, int] = (0, 0)  # the vocabulary size, and the bytes of one logit; both are 0 until the first call
    _batches: list[dict[str, Any]] = field(default_factory=list)
    _logits: dict[int, torch.Tensor] = field(default_factory=dict)

    def __call__(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the logits `[rows, 1, vocabulary]` of the last position, in fp32, or in float64 where the model computes in it,
        from the arguments of a forward, which are the same on all ranks. `past_key_values` is empty in the first call, and the same
        object in all calls; without it no keys and values are cached. Raises `DataError` for fewer rows than microbatches, and
        `LayoutError` for a model whose cache is not `past_key_values`."""
        rows, count = len(inputs["input_ids"]), self.schedule.microbatches
        if rows < count:
            raise DataError(f"{rows} prompts cannot be generated in {count} microbatches; each needs a row")
        cache = inputs.get(CACHE)
        if cache is None and inputs.get("use_cache"):
            why = f"{type(self.stages.model).__name__} keeps something else than past_key_values between tokens"
            raise LayoutError(f"{why}, which stages of a pipeline cannot; pass use_cache=False")
        if cache is not None and not self._caches:
            places = product(range(len(self.stages.own)), range(count))
            self._caches = {place: copy.deepcopy(cache) if any(place) else cache for place in places}
        cut = {  # Arguments without a row per prompt are the same in every part.
            name: value.tensor_split(count)
            for name, value in inputs.items()
            if name in _BY_ROW and isinstance(value, torch.Tensor) and value.dim() == 2 and len(value) == rows
        }
        passed = {name: value for name, value in inputs.items() if value is not None or name != CACHE}
        self._batches = [passed | {name: parts[number] for name, parts in cut.items()} for number in range(count)]
        self._logits = {}
        with torch.no_grad():
            self.executor.run(self.schedule, self)
        group, logits = self.executor.group, torch.empty(rows, 1, 0)
        if self._logits:
            logits = torch.cat([self._logits[number] for number in range(count)])
            logits = logits if logits.dtype is torch.float64 else logits.float()
        if not any(self._logit):
            self._logit = max((row[0], row[1]) for row in group.gather_integers([logits.shape[-1], logits.itemsize]))
        if not self._logits:
            dtype = torch.float64 if self._logit[1] == torch.float64.itemsize else torch.float32
            logits = torch.empty(rows, 1, self._logit[0], dtype=dtype, device=inputs["input_ids"].device)
        return group.broadcast(logits.contiguous(), group.size - 1, "logits of the last stage")

    def signature(self, microbatch: int) -> Hashable:
        return "tokens", tuple(self._batches[microbatch]["input_ids"].shape)

    def run(self, action: Action, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        chunk, microbatch = action.chunk, action.microbatch
        stages, batch = self.stages, dict(self._batches[microbatch])
        if hasattr(getattr(stages.model, "config", None), "output_router_logits"):
            batch["output_router_logits"] = False  # Experts have no loss here.
        if CACHE in batch:
            batch[CACHE] = self._caches[chunk, microbatch]
        if not stages.is_last(chunk):
            return stages.forward(chunk, batch, received, balance=False)
        with stages.chunk(chunk, received, balance=False):
            self._logits[microbatch] = self.call(**batch).logits[:, -1:]
        return ()


class GenerationBatch(Protocol):
    """A batch of prompts for which tokens are generated; several of them run at the same time, each in another stage."""

    def enter(self) -> None:
        """Make the model ready for the next forward of this batch, before each part of it."""

    def shape(self) -> tuple[int, int]:
        """Return the rows and columns of `input_ids` in the next forward, constant during `run_token_forwards`."""

    def inputs(self) -> dict[str, Any]:
        """Return the model's arguments for the next forward, the same on all ranks of the pipeline."""

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose the next tokens from the logits `[rows, vocabulary]` of the last positions, on the last stage. Returns `[2, rows]`
        in float64 on the CPU: token ids, and the logarithms of their probabilities."""

    def append(self, chosen: torch.Tensor) -> None:
        """Append the tokens `[2, rows]` that `choose` has returned on the last stage; all ranks call this."""


@dataclass(slots=True)
class InterleavedBatches:
    """Generates tokens for several batches, so that each stage of a pipeline computes another batch at the same time:

        first stage     batch 0  batch 1  batch 0  batch 1           with as many batches as stages no stage waits
        last stage               batch 0  batch 1  batch 0  batch 1

    Microbatch n of the schedule is forward n // len(batches) of batch n % len(batches), which needs the tokens chosen in the
    batch's forward before. `call` calls the whole model, on the last stage."""

    stages: Stages
    call: Callable[..., Any]
    batches: Sequence[GenerationBatch]
    group: ProcessSet
    _inputs: dict[int, dict[str, Any]] = field(default_factory=dict)
    _chosen: deque[tuple[GenerationBatch, torch.Tensor, Callable[[], None]]] = field(default_factory=deque)
    """On the last stage, the chosen tokens that are being sent to the other stages."""
    _appended: int = 0

    def signature(self, microbatch: int) -> Hashable:
        return "turn", self.batches[microbatch % len(self.batches)].shape()

    def run(self, action: Action, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        chunk, microbatch = action.chunk, action.microbatch
        stages, batch = self.stages, self.batches[microbatch % len(self.batches)]
        if not chunk:
            if microbatch >= len(self.batches):
                self._append_next()
            self._inputs[microbatch] = batch.inputs()
        batch.enter()
        inputs = self._inputs[microbatch] if chunk + 1 < len(stages.own) else self._inputs.pop(microbatch)
        if not stages.is_last(chunk):
            return stages.forward(chunk, inputs, received, balance=False)
        with stages.chunk(chunk, received, balance=False):
            logits = self.call(**inputs).logits[:, -1]
        chosen = batch.choose(logits)
        self._chosen.append((batch, chosen, self._start(chosen)))
        return ()

    def finish(self) -> None:
        """Receive the tokens chosen in the last forward of each batch."""
        for _ in self.batches:
            self._append_next()

    def _append_next(self) -> None:
        # The last stage broadcasts the chosen tokens in the order of microbatches, in which other stages receive them.
        if self._chosen:
            batch, chosen, wait = self._chosen.popleft()
        else:
            batch = self.batches[self._appended % len(self.batches)]
            chosen = torch.zeros(2, batch.shape()[0], dtype=torch.float64)
            wait = self._start(chosen)
        self._appended += 1
        wait()
        batch.append(chosen)

    def _start(self, chosen: torch.Tensor) -> Callable[[], None]:
        return self.group.broadcast_async(chosen, self.group.size - 1, "tokens that the last stage has chosen")
