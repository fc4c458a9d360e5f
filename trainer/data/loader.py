"""`Feed`, which makes checked batches, and `BatchLoader`, which yields a rank's in order, made in this process or by workers.

Workers are those of torch's `DataLoader`, whose sampler names microbatches: a worker makes a microbatch as this process would, with
random numbers seeded by the microbatch, so their number changes no batch. They are forked, so that a dataset may hold objects that
cannot be pickled (docs/decisions/0023-data-workers-are-forked.md), and end with this process, however it ends."""

import faulthandler
import fcntl
import multiprocessing
import os
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from zeromesh.environment import available_cores, die_with_parent
from zeromesh.errors import ConfigError, DataError, StorageError, ZeromeshError, counted, some, summary
from zeromesh.launch.signals import STOP_SIGNALS
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.offload.io.transfer import states_hidden_from_children
from zeromesh.rng import data_randomness
from zeromesh.trainer.config.sections.training import DataSection
from zeromesh.trainer.data.collate import IGNORED_LABEL, BatchRules, MapDataset, count_targets
from zeromesh.trainer.data.sampler import BatchPlan, Blocks, Microbatch, SampleOrder, blocks_of_tokens
from zeromesh.trainer.data.streaming import StreamedDataset

_MOST_WORKERS = 4  # of a rank that `auto` starts, enough for most tokenizers and images
MOST_PREFETCHED = 128  # microbatches; each tensor of them holds a file descriptor until it is used
_POLL_SECONDS = 0.25  # between two looks at the workers, while this process waits for a batch
_GRACE_SECONDS = 2.0  # in which workers may end before they are killed
_STACK_SIGNAL = signal.SIGRTMAX  # Schedulers do not send it.
_SIGNALS = {"SIGKILL": ", as where memory runs out", "SIGBUS": ", as where /dev/shm is full (docker run --shm-size)"}

_SEARCHED_BATCHES = 100  # global batches, for a target before the run; later ones without targets are skipped

_TOKEN_FIELDS = ("input_ids", "labels", "decoder_input_ids")  # `[batch, sequence]` in text, limited by `batch.tokens`

Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """A dataset with its order, from which checked batches are made by global sample index."""

    dataset: MapDataset | StreamedDataset
    order: SampleOrder
    plan: BatchPlan
    rules: BatchRules

    def fetch(self, microbatch: Microbatch) -> dict[str, Any]:
        """Return a microbatch's batch, on CPU, with the fields that the model accepts. Raises `DataError` above `batch.tokens`."""
        with data_randomness(self.order.seed, microbatch.first_sample):
            batch = self.rules.accepted(self._make_batch(microbatch))
        if self.plan.tokens is not None and not 0 < (size := _tokens_of(batch)) <= self.plan.tokens:
            indices = [self.order.dataset_index(each) for each in microbatch.samples]
            what = f"a batch of the samples {some(indices, 8)} of the dataset has {size} tokens ({', '.join(_TOKEN_FIELDS)})"
            cure = "cut or leave out samples, have the data_collator pad to the longest one, or set batch.micro_size instead"
            raise DataError(f"{what}, and batch.tokens allows 1 to {self.plan.tokens}; raise it, {cure}")
        return batch

    def blocks(self, step: int) -> Blocks:
        """Return the blocks of a step by `batch.tokens`, from the tokens of each sample in a batch of its own."""
        samples = self.plan.samples_of(step)
        alone = (Microbatch(first_sample=each, samples=(each,), weight=1) for each in samples)
        return blocks_of_tokens(samples, [_tokens_of(self.fetch(each)) for each in alone], self.plan.tokens or 0)

    def _make_batch(self, microbatch: Microbatch) -> dict[str, Any]:
        return self.rules.make_batch(self.dataset, [self.order.dataset_index(each) for each in microbatch.samples])

    def first_batch(self) -> dict[str, Any]:
        """Return the first batch with a target, all fields kept. Raises `DataError` on all ranks if the first global
        batches, which every rank reads, have none. A batch without `labels` passes: the loss may use other fields."""
        plan = replace(self.plan, data_ranks=1, shares=(), blocks=None)  # Without blocks, no lengths are read.
        steps = _SEARCHED_BATCHES if isinstance(self.dataset, StreamedDataset) else 1
        if plan.epoch_size is not None:
            steps = min(_SEARCHED_BATCHES, -(-plan.epoch_size // plan.global_size))
        for step, index in (divmod(number, plan.accumulation) for number in range(steps * plan.accumulation)):
            microbatch = plan.microbatch(step, 0, index)
            with data_randomness(self.order.seed, microbatch.first_sample):  # The ranks mask the same tokens.
                batch = self._make_batch(microbatch)
            labels = batch.get("labels")
            if not isinstance(labels, Tensor) or count_targets(labels, causal=self.rules.causal):
                return batch
        cure = "their loss is the mean of nothing; check how the dataset or the data_collator masks labels"
        first = counted(plan.samples_of(steps - 1).stop, "sample")
        raise DataError(f"every label of the first {first} is {IGNORED_LABEL}: {cure}")


def _tokens_of(batch: Batch) -> int:
    return max((batch[name].numel() for name in _TOKEN_FIELDS if name in batch), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """The data workers of a rank: `count` processes, or the rank itself for 0. `timeout_seconds` is the limit of a microbatch."""

    count: int = 0
    timeout_seconds: float = 600.0
    pinned: bool = False

    @classmethod
    def choose(cls, data: DataSection, device: torch.device, local_ranks: int) -> Self:
        """Return the configured workers; auto is 0 on a CPU. Raises `ConfigError` where this process may have no children."""
        on_device = is_accelerator(device)
        childless = bool(multiprocessing.current_process().daemon)
        automatic = min(_MOST_WORKERS, available_cores() // local_ranks) if on_device and not childless else 0
        if (count := automatic if data.workers == "auto" else data.workers) and childless:
            why = "but this process is a daemon of multiprocessing, which may have no children"
            raise ConfigError(f"data.workers: {count}, {why}; set it to 0, or start the process with daemon=False")
        return cls(count=count, timeout_seconds=data.timeout_seconds, pinned=on_device)

    def notes(self, dataset: Any) -> list[str]:
        if not self.count:
            return []
        if isinstance(dataset, StreamedDataset):
            return ["data: a worker process of each rank reads the stream" + (", one alone" if self.count > 1 else "")]
        return [f"data: {counted(self.count, 'worker process')} of each rank"]


class _Result(NamedTuple):
    """A batch and, at the end of a step, the stream state; or an error."""

    batch: Batch
    state: dict[str, Any] | None = None
    failure: ZeromeshError | None = None


class BatchLoader(AbstractContextManager["BatchLoader"]):
    """Loader of the batches of one data rank, a context manager that ends its workers. Nothing is prefetched beyond the exclusive
    step `last`. A stream resumes from the saved `state`. `waiting` is called a few times a second while the loader waits."""

    def __init__(
        self,
        feed: Feed,
        data_rank: int,
        workers: Workers,
        *,
        last: int,
        state: Mapping[str, Any] | None = None,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.feed = feed
        self._last = last
        self._state = state  # The stream state after the last complete step.
        self._waiting = waiting
        self._stream = feed.dataset if isinstance(feed.dataset, StreamedDataset) else None
        if self._stream is not None and not workers.count:
            self._stream.waiting = waiting
        # A stream is sequential, so one worker reads it.
        most = 1 if self._stream is not None else last * feed.plan.accumulation
        self._workers = replace(workers, count=min(workers.count, most))
        self._data_rank = data_rank
        self._maker = _BatchMaker(feed, state)
        self._results: Iterator[_Result] | None = None
        self._processes: list[BaseProcess] = []
        self._report = -1  # the file descriptor to which a worker writes its stack
        self._next_position = (0, 0)  # The step of the next prefetched microbatch, and its index within the step.

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, at_once: bool = False) -> None:
        """End the workers: kill them `at_once`, or let torch end them and kill those that still run 2 seconds later."""
        if self._report < 0:
            return
        if at_once:
            _kill_processes(self._processes)
        self._results = None  # torch ends the workers of an iterator that is dropped.
        until = time.monotonic() + (0.0 if at_once else _GRACE_SECONDS)
        for each in self._processes:
            each.join(max(0.0, until - time.monotonic()))
        _kill_processes(self._processes)
        os.close(self._report)
        self._report = -1

    def share_out(self, shares: tuple[int, ...]) -> None:
        """Cut the rounds of the steps from the next one on by `shares`; what workers have prefetched is made again."""
        self.close()
        self.feed = replace(self.feed, plan=replace(self.feed.plan, shares=shares))

    def step(self, step: int) -> list[Batch]:
        """Return the batches of all microbatches of data step `step` (from 0), on the CPU."""
        return [self.batch(step, index) for index in range(self.feed.plan.rounds_of(step))]

    def batch(self, step: int, index: int) -> Batch:
        """Return microbatch `index` of a step. Raises `DataError` for data that cannot be read or trained on; see `_next`."""
        if not self._workers.count:
            made = self._maker.make(*self._place(step, index))
        else:
            if self._results is None or self._next_position != (step, index):
                self.close()
                self._start(step, index)
            made = self._next()
            self._next_position = (step, index + 1) if index + 1 < self.feed.plan.rounds_of(step) else (step + 1, 0)
            if made.failure is not None:
                self.close()
                raise made.failure
        self._state = made.state or self._state
        if self._workers.pinned or not self._workers.count:
            return made.batch
        # A tensor from a worker holds a file descriptor for its lifetime, and a clone does not.
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in made.batch.items()}

    def state(self, step: int) -> Mapping[str, Any]:
        """Return the stream state before the next data step `step`; empty for a dataset with a length."""
        if self._stream is not None and self._state is None:
            self._state = self._stream.state(self.feed.plan.samples_of(step).start)
        return self._state or {}

    def _place(self, step: int, index: int) -> tuple[Microbatch, int | None]:
        """Return a microbatch and, if it is this rank's last one of the step, the sample that follows the step."""
        plan = self.feed.plan
        after = plan.samples_of(step + 1).start if index + 1 == plan.rounds_of(step) else None
        return plan.microbatch(step, self._data_rank, index), after

    def _start(self, step: int, index: int) -> None:
        """Start workers that make all microbatches from microbatch `index` of `step` on, in order."""
        rounds_of, count = self.feed.plan.rounds_of, self._workers.count
        self._maker = _BatchMaker(self.feed, self._state)
        self._report = os.memfd_create("zeromesh-data-workers")
        ahead = max(2 * count, min(rounds_of(step) + 1, MOST_PREFETCHED))
        before = set(multiprocessing.active_children())
        on_child = signal.getsignal(signal.SIGCHLD)
        # More workers than cores are fine, as they may wait for disks.
        with warnings.catch_warnings(action="ignore"), states_hidden_from_children():
            loader: DataLoader[_Result] = DataLoader(
                self._maker,
                sampler=(
                    self._place(each, number)
                    for each in range(step, self._last)
                    for number in range(index if each == step else 0, rounds_of(each))
                ),
                batch_size=None,
                collate_fn=lambda made: made,
                num_workers=count,
                prefetch_factor=-(-ahead // count),
                pin_memory=self._workers.pinned,
                timeout=_POLL_SECONDS,
                worker_init_fn=partial(_begin_worker, os.getpid(), self._report),
                multiprocessing_context="fork",
                generator=torch.Generator(),  # without it, torch draws from the user's generator
            )
            self._results = iter(loader)
        if threading.current_thread() is threading.main_thread() and on_child is not None:
            # torch's handler would raise wherever this process is when a worker ends, such as in a collective.
            signal.signal(signal.SIGCHLD, on_child)
        self._processes = [each for each in multiprocessing.active_children() if each not in before]
        # Workers ignore SIGTERM, and an exiting interpreter waits for its children.
        Finalize(self, _kill_processes, args=(self._processes,), exitpriority=1)

    def _next(self) -> _Result:
        """Return the next result. Raises `StorageError` if a worker was killed, `DataError` if it ended or is late with a piece."""
        began, read = time.monotonic(), 0
        while True:
            self._waiting()
            try:
                return next(cast("Iterator[_Result]", self._results))
            except (RuntimeError, ConnectionError) as error:  # A worker may end while it sends a tensor.
                if self._stream is not None and self._stream.reading[1] != read:
                    began, read = time.monotonic(), self._stream.reading[1]
                late = time.monotonic() - began > self._workers.timeout_seconds
                gone = any(each.exitcode is not None for each in self._processes)
                if late or gone or "timed out" not in str(error):
                    failure = self._failure(error)
                    self.close(at_once=True)
                    raise failure from None

    def _failure(self, error: Exception) -> ZeromeshError:
        ends = []
        for each in self._processes:
            if each.exitcode is not None and each.exitcode < 0:
                name = signal.Signals(-each.exitcode).name
                ends.append(f"process {each.pid} was ended by {name}{_SIGNALS.get(name, '')}")
            elif each.exitcode is not None:
                ends.append(f"process {each.pid} ended with status {each.exitcode}")
        if ends:
            rest = "or the system did; data.workers: 0 reads in the training process"
            why = f"A dataset or a library under it ended the process, {rest}"
            killed = any((each.exitcode or 0) < 0 for each in self._processes)  # A run recovers from that.
            return (StorageError if killed else DataError)(f"a data worker is gone: {', '.join(ends)}. {why}")
        limit = f"{self._workers.timeout_seconds:g} seconds"
        if stacks := [stack for each in self._processes if (stack := self._stack(each))]:
            late = f"a data worker took more than {limit} for one microbatch (data.timeout_seconds)"
            return DataError("\n".join([f"{late}, and was ended while it was here:", *stacks]))
        return DataError(f"data workers gave nothing for {limit} (data.timeout_seconds): {summary(error)}")

    def _stack(self, process: BaseProcess) -> str:
        """Return the stack trace of a busy worker, newest call first; empty if idle or silent. A signal asks for it, since
        a timer of `faulthandler` in the parent would make the child wait forever for a thread that a fork does not copy."""
        os.ftruncate(self._report, os.lseek(self._report, 0, os.SEEK_SET))
        os.kill(process.pid or 0, _STACK_SIGNAL)
        until, text, before = time.monotonic() + 1.0, "", None
        while time.monotonic() < until and (not text or text != before):
            time.sleep(0.05)
            before, text = text, os.pread(self._report, 1 << 14, 0).decode(errors="replace")
        making, mark, _ = text.partition(f" in {_BatchMaker.__getitem__.__name__}\n")
        waiting = not mark and " in _worker_loop\n" in text
        return "" if waiting else (making + mark).partition("\n")[2].rstrip()


class _BatchMaker(Dataset[_Result]):
    """Dataset of microbatches, by `BatchLoader._place`. A worker returns errors by their text, as not every one can be pickled."""

    def __init__(self, feed: Feed, state: Mapping[str, Any] | None) -> None:
        self.feed = feed
        self._state = state
        self._begun = False

    def __getitem__(self, place: tuple[Microbatch, int | None]) -> _Result:
        try:
            made = self.make(*place)
            _require_sendable(made.batch, place[0])
            return made
        except ZeromeshError as error:
            return _Result({}, failure=type(error)(str(error)))
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises
            where = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
            shown = "".join(traceback.format_exception(error)).rstrip()
            return _Result({}, failure=DataError(f"a data worker: {summary(error)}{where}\n{shown}"))

    def make(self, microbatch: Microbatch, after: int | None) -> _Result:
        """Return the batch of a microbatch and, for the last one of a step, the state of the stream after it."""
        stream = self.feed.dataset if isinstance(self.feed.dataset, StreamedDataset) else None
        if stream is not None and not self._begun:
            with data_randomness(self.feed.order.seed, 0):
                if self._state is not None:
                    stream.restore(self._state, "the checkpoint")
                else:
                    stream.begin_again()
        self._begun = False  # If this raises, the next call restores the stream first.
        batch = self.feed.fetch(microbatch)
        state = None if stream is None or after is None else stream.state(after)
        self._begun = True
        return _Result(batch, state)


def _require_sendable(batch: Batch, microbatch: Microbatch) -> None:
    for name, value in batch.items():
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and (leaf.device.type != "cpu" or leaf.requires_grad):
                why = "needs gradients" if leaf.device.type == "cpu" else f"lies on {leaf.device}"
                what = f"{name} of global samples {some(microbatch.samples, 8)} {why}, and a data worker cannot hand that over"
                raise DataError(f"{what}; return plain tensors on the CPU, or set data.workers: 0")
        try:
            ForkingPickler.dumps(pytree.tree_map_only(Tensor, lambda _: None, value))
        except Exception as error:
            why = f"{name} is a {type(value).__name__}, which a data worker cannot hand over ({summary(error)})"
            raise DataError(f"{why}; leave it out of the batch, or set data.workers: 0") from error


def _kill_processes(processes: Sequence[BaseProcess]) -> None:
    for each in processes:
        if each.exitcode is None:
            each.kill()
            each.join()


def _begin_worker(parent: int, report: int, worker: int) -> None:
    """Start a worker, which dies with its parent and ignores the stop signals of the run."""
    faulthandler.register(_STACK_SIGNAL, report, all_threads=False)
    die_with_parent(parent)
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    for name in ("stdout", "stderr"):  # Undo rich's redirection, as the console belongs to the parent.
        file = getattr(sys, name)
        setattr(sys, name, getattr(file, "rich_proxied_file", file))
    # Files that are open for reading are opened anew, since forked processes share file offsets.
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            number = int(name)
            if not stat.S_ISREG(os.fstat(number).st_mode) or fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE:
                continue
            inheritable, position = os.get_inheritable(number), os.lseek(number, 0, os.SEEK_CUR)
            own = os.open(f"/proc/self/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(own, position, os.SEEK_SET)
            os.dup2(own, number, inheritable)
            os.close(own)
