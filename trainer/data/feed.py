"""The datasets of a run, and the feeds of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from zeromesh.errors import DataError, counted, plural
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import BatchRules, MapDataset
from zeromesh.trainer.data.loader import MOST_PREFETCHED, Feed
from zeromesh.trainer.data.packing import MixedDataset, TokenDataset
from zeromesh.trainer.data.sampler import BatchPlan, SampleOrder
from zeromesh.trainer.data.streaming import StreamedDataset, digest
from zeromesh.trainer.data.tokenizer import PretrainedTokenizer, Tokenizer

_SAME_SAMPLES = "datasets and collators must give the same samples for the same index on every rank"
_COMPARED_ELEMENTS = 65536  # of each tensor that ranks compare, which covers text and the beginning of an image


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The datasets of a run, their tokenizer or image processor, and facts about the text that was loaded."""

    train: Any
    eval: Any = None  # a map-style dataset, a mapping of names to such datasets, or None
    tokenizer: Tokenizer | None = None
    byte_pair_entropy: float | None = None  # Of the training text, in nats per token; the byte tokenizer's only.
    answer_ends: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    processor: Any = None
    notes: tuple[str, ...] = ()
    limited: bool = False  # True if `data.eval_samples` limits an evaluation set.

    def evaluation_sets(self) -> dict[str, MapDataset]:
        """Return each evaluation set by its name in error messages."""
        if isinstance(self.eval, Mapping):
            return {f"eval_dataset[{name!r}]": each for name, each in self.eval.items()}
        return {} if self.eval is None else {"eval_dataset": self.eval}

    def datasets(self) -> dict[str, MapDataset | StreamedDataset]:
        return ({} if self.train is None else {"train_dataset": self.train}) | self.evaluation_sets()

    def row(self) -> str:
        what = f"sequences of {self.train.sequence_length} tokens" if self.tokenizer else "samples"
        train = () if self.train is None else self.train
        text = "a stream" if isinstance(train, StreamedDataset) else f"{len(train):,} {what}"
        count = sum(map(len, self.evaluation_sets().values()))
        return f"{text}; {count:,} for evaluation" + (" (data.eval_samples)" if self.limited else "") if count else text

    @property
    def processing_class(self) -> Any:
        """The Hugging Face tokenizer or image processor, which is saved with the model, or None."""
        return self.tokenizer.tokenizer if isinstance(self.tokenizer, PretrainedTokenizer) else self.processor

    def description(self, *, shuffle: bool) -> dict[str, Any]:
        """Describe the samples and their order, independent of file paths, which a resumed run must match."""
        if self.tokenizer is not None:
            found = {"train": self.train.fingerprint(), "sequence_length": self.train.sequence_length}
            mixed = {"mixture": ":".join(map(str, self.train.weights))} if isinstance(self.train, MixedDataset) else {}
            return {**found, "shuffle": shuffle, **mixed}
        if isinstance(self.train, StreamedDataset):
            return {"train_samples": "a stream", "shuffle": self.train.block if shuffle else False}
        return {"train_samples": 0 if self.train is None else len(self.train), "shuffle": shuffle}


@dataclass(frozen=True, kw_only=True, slots=True)
class Feeds:
    """The feeds of a run; `plan` divides the training data into global batches and microbatches."""

    config: TrainerConfig
    data: RunData
    plan: BatchPlan
    rules: BatchRules

    def train(self) -> Feed | None:
        train, shuffle = self.data.train, self.config.data.shuffle
        return None if train is None else self._feed(train, self.plan, shuffle=shuffle)

    def evaluation(self, dataset: MapDataset) -> Feed:
        """Return the feed of an evaluation dataset, as one global batch in dataset order."""
        batch = self.config.batch
        micro = min(batch.eval_micro_size or batch.micro_size, len(dataset))
        tokens = None if batch.eval_micro_size else batch.tokens
        plan = BatchPlan(global_size=len(dataset), micro_size=micro, tokens=tokens, data_ranks=self.plan.data_ranks)
        return self._feed(dataset, plan, shuffle=False)

    def by_name(self) -> dict[str, Feed]:
        evaluations = {name: self.evaluation(dataset) for name, dataset in self.data.evaluation_sets().items()}
        return evaluations if (train := self.train()) is None else {"train_dataset": train, **evaluations}

    def example(self) -> dict[str, Any] | None:
        """Return the first batch of the run with the fields that the model accepts; None without data."""
        batch = next((feed.first_batch() for feed in self.by_name().values()), None)
        return batch and self.rules.accepted(batch)

    def _feed(self, dataset: MapDataset | StreamedDataset, plan: BatchPlan, *, shuffle: bool) -> Feed:
        seed = self.config.run.seed if self.config.data.seed is None else self.config.data.seed
        endless = isinstance(dataset, StreamedDataset)
        length = dataset.block if isinstance(dataset, StreamedDataset) else len(dataset)
        parts: Any = dataset.parts if isinstance(dataset, MixedDataset) else (dataset,)
        mixed = tuple(zip(map(len, parts), dataset.weights, strict=True)) if isinstance(dataset, MixedDataset) else ()
        order = SampleOrder(length=length, seed=seed, shuffle=shuffle, endless=endless, parts=mixed)
        for part in parts:
            if isinstance(part, TokenDataset) and self.rules.vocab_size is not None:
                part.check_vocabulary(self.rules.vocab_size)
        feed = Feed(dataset=dataset, order=order, plan=plan, rules=self.rules)
        if plan.tokens is None:
            return feed
        return replace(feed, plan=replace(plan, blocks=lru_cache(maxsize=MOST_PREFETCHED + 2)(feed.blocks)))


def require_same_data(mesh: Mesh, sets: Mapping[str, Any], others: Mapping[str, object]) -> None:
    """Raise `DataError` where the datasets' kinds and lengths, or `others`, differ between ranks."""
    kinds = {
        name: "a stream" if isinstance(dataset, StreamedDataset) else counted(len(dataset), "sample")
        for name, dataset in sets.items()
    }
    advice = "Give every rank the whole of each dataset: the trainer deals its samples out to ranks"
    mesh.world.require_same({**kinds, **others}, DataError, advice=advice)


def require_same_blocks(plan: BatchPlan, step: int, mesh: Mesh) -> None:
    """Raise `DataError` where ranks know other lengths of samples, and would run other numbers of microbatches."""
    if plan.blocks is not None:
        cut = {"the microbatches of batch.tokens": digest([plan.blocks(step)])}
        mesh.world.require_same(cut, DataError, advice=_SAME_SAMPLES.capitalize())


def require_same_batches(batches: Sequence[Mapping[str, Any]], mesh: Mesh, cure: str = _SAME_SAMPLES) -> None:
    """Raise `DataError` where the ranks of a tensor, context or pipeline group, which share a batch, hold different batches."""
    parts = [dict(sorted(batch.items())) for batch in batches]
    shapes = [{name: getattr(value, "shape", None) for name, value in part.items()} for part in parts]
    own = [mesh.data_index, len(batches), digest([*shapes, *[digest(part, _COMPARED_ELEMENTS) for part in parts]])]
    rows = mesh.world.gather_integers(own)
    if others := [str(rank) for rank, row in zip(mesh.world.ranks, rows, strict=True) if row[0] == own[0] and row != own]:
        why = f"{plural(len(others), 'rank')} {', '.join(others)} got other data than rank {mesh.rank}, and they"
        raise DataError(f"{why} compute one batch together (parallel.tensor, parallel.context, parallel.pipeline); {cure}")
