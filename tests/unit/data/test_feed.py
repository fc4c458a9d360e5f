"""The datasets of a run in words, and the feeds of them: their batches, orders and seeds, and what ranks have to share."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import ConcatDataset, Subset

from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.data.collate import BatchRules
from zeromesh.trainer.data.feed import Feeds, RunData, require_same_batches
from zeromesh.trainer.data.loader import Feed
from zeromesh.trainer.data.packing import MixedDataset, TokenDataset
from zeromesh.trainer.data.sampler import BatchPlan, SampleOrder
from zeromesh.trainer.data.streaming import StreamedDataset
from zeromesh.trainer.data.token_cache import BEGINS, ID_SHIFT, StoredText, TextAmount
from zeromesh.trainer.data.tokenizer import ByteTokenizer
from zeromesh.trainer.setup.build import _make_streamed

ROWS = [{"x": float(number)} for number in range(10)]
STREAM = StreamedDataset(ROWS, block=4)


def tokens(*ids: int) -> TokenDataset:
    """Sequences of two tokens."""
    array, none = np.asarray(ids, np.uint8), TextAmount()
    stored: dict[str, Any] = {"kept": none, "held": none, "remarks": {}, "path": None, "blocks": [None]}
    text = StoredText(tokens=array, largest=max(ids), digest=str(ids), **stored)
    keys = {"separate": False, "masked": False, "separator": 0}
    return TokenDataset.join(text, 0, TextAmount(tokens=len(ids)), 2, **keys)


def documents(*lengths: int) -> TokenDataset:
    """Documents of these lengths, each in a sequence of 8 tokens."""
    array = np.concatenate([np.arange(1, size + 1) << ID_SHIFT for size in lengths]).astype(np.uint16)
    array[np.cumsum([0, *lengths[:-1]])] |= BEGINS
    stored: dict[str, Any] = {"kept": TextAmount(), "held": TextAmount(), "remarks": {}, "path": None, "blocks": [None]}
    text = StoredText(tokens=array, largest=9, digest="", **stored)
    return TokenDataset.pack(text, 0, TextAmount(tokens=len(array)), 8, packing=False, separate=False, separator=0)


def feeds(data: RunData, vocab_size: int | None = None, /, **sections: Any) -> Feeds:
    plan = BatchPlan(global_size=4, micro_size=2, data_ranks=2)
    return Feeds(config=load_config(sections), data=data, plan=plan, rules=BatchRules(vocab_size=vocab_size))


@pytest.mark.parametrize(
    ("data", "row"),
    [
        (RunData(train=None), "0 samples"),
        (RunData(train=ROWS * 200), "2,000 samples"),
        (RunData(train=STREAM), "a stream"),
        (RunData(train=STREAM, eval=ROWS), "a stream; 10 for evaluation"),
        (RunData(train=ROWS, eval={"a": ROWS, "b": ROWS * 200}), "10 samples; 2,010 for evaluation"),
        (RunData(train=ROWS, eval=ROWS, limited=True), "10 samples; 10 for evaluation (data.eval_samples)"),
        (RunData(train=ROWS, limited=True), "10 samples"),
        (RunData(train=tokens(1, 2, 3, 4), tokenizer=ByteTokenizer()), "2 sequences of 2 tokens"),
    ],
)
def test_datasets_in_words(data: RunData, row: str) -> None:
    assert data.row() == row


def test_what_a_resumed_run_has_to_have() -> None:
    text, mixed = tokens(1, 2, 3, 4), MixedDataset([tokens(1, 2), tokens(3, 4)], [0.5, 1.0])
    found = [
        RunData(train=train, tokenizer=tokenizer).description(shuffle=shuffle)
        for train, tokenizer in ((text, ByteTokenizer()), (mixed, ByteTokenizer()), (STREAM, None), (ROWS, None), (None, None))
        for shuffle in (True, False)
    ]
    of_text = {"train": text.fingerprint(), "sequence_length": 2}
    of_mixed = {"train": mixed.fingerprint(), "sequence_length": 2, "mixture": "1:2"}
    assert found == [
        *({**each, "shuffle": shuffle} for each in (of_text, of_mixed) for shuffle in (True, False)),
        {"train_samples": "a stream", "shuffle": 4},
        {"train_samples": "a stream", "shuffle": False},
        *({"train_samples": count, "shuffle": shuffle} for count in (10, 0) for shuffle in (True, False)),
    ]


def test_datasets_have_their_names() -> None:
    both = RunData(train=ROWS, eval={"a": ROWS[:2], "b": ROWS[:3]})
    assert {name: len(each) for name, each in both.datasets().items()} == {
        "train_dataset": 10, "eval_dataset['a']": 2, "eval_dataset['b']": 3
    }  # fmt: skip
    assert RunData(train=None, eval=ROWS).datasets() == {"eval_dataset": ROWS}
    assert [*feeds(both).by_name()] == [*both.datasets()]
    assert feeds(RunData(train=None)).example() is None
    assert feeds(RunData(train=None, eval=ROWS[4:])).example()["x"].tolist() == [4.0, 5.0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("batch", "count", "micro"),
    [({"micro_size": 3}, 10, 3), ({"micro_size": 3, "eval_micro_size": 5}, 10, 5), ({"micro_size": 8}, 7, 7)],
)
def test_an_evaluation_is_one_global_batch_in_order(batch: dict[str, int], count: int, micro: int) -> None:
    found = feeds(RunData(train=ROWS), batch={"global_size": 16, **batch}).evaluation(ROWS[:count])
    assert found.plan == BatchPlan(global_size=count, micro_size=micro, data_ranks=2)
    assert [found.order.dataset_index(sample) for sample in range(count)] == list(range(count))


LENGTHS = (5, 2, 7, 3, 4, 1)
IDS = [{"input_ids": list(range(length)), "labels": index % 2} for index, length in enumerate(LENGTHS)]


def padded(samples: Any, multiple: int = 1) -> dict[str, Any]:
    """`input_ids` with padding to the longest sample."""
    longest = -(-max(len(each["input_ids"]) for each in samples) // multiple) * multiple
    rows = [functional.pad(torch.as_tensor(each["input_ids"]), (0, longest - len(each["input_ids"]))) for each in samples]
    return {"input_ids": torch.stack(rows)}


def cut(data: Any, tokens: int, multiple: int | None = None, collate: Any = None, **section: Any) -> Any:
    """The blocks of the first step, as positions in the dataset."""
    keys: dict[str, Any] = {"batch": {"global_size": 6, "tokens": tokens}, "data": {"shuffle": False, **section}}
    plan = BatchPlan(global_size=6, micro_size=1, tokens=tokens, data_ranks=2)
    rules = BatchRules(length_multiple=multiple, collate=collate)
    feed = Feeds(config=load_config(keys), data=RunData(train=data), plan=plan, rules=rules).train()
    assert feed is not None
    assert feed.plan.blocks is not None
    return feed.plan.blocks(0)


def test_microbatches_by_a_budget_of_tokens() -> None:
    wanted = ((0, 2), (1, 3, 4), (5,))
    mixed = ConcatDataset([Subset(IDS, [0, 1]), IDS[2:]])  # type: ignore[arg-type,list-item]
    arrays = [{"input_ids": torch.arange(each)} for each in LENGTHS]
    for data in (IDS, arrays, mixed):
        assert cut(data, 14, collate=padded) == wanted
    # What a collator pads to is counted too.
    assert cut(IDS, 16, collate=partial(padded, multiple=4)) == ((0, 2), (1, 3, 4, 5))
    text = {"format": "chat", "packing": False}
    assert cut(documents(*LENGTHS), 14, 1, **text) == wanted
    assert cut(documents(*LENGTHS), 16, 4, **text) == ((0, 2), (1, 3, 4, 5))
    # Without raggedness, as many as fit.
    assert cut(tokens(*range(1, 13)), 4) == ((0, 1), (2, 3), (4, 5))


def test_what_a_budget_of_tokens_refuses() -> None:
    with pytest.raises(DataError, match=r"samples 2 of the dataset has 7 tokens .* batch\.tokens allows 1 to 6; raise"):
        cut(IDS, 6, collate=padded)
    with pytest.raises(DataError, match=r"samples 2 of the dataset has 8 tokens"):
        cut(documents(3, 2, 7, 1, 1, 1), 7, 4, format="chat", packing=False)
    with pytest.raises(DataError, match=r"samples 0 of the dataset has 0 tokens \(input_ids, .* set batch\.micro_size"):
        cut([{"x": 1.0}] * 6, 14)
    plan = BatchPlan(global_size=2, micro_size=1, tokens=4, data_ranks=1, blocks=lambda step: ((0, 1),))
    order = SampleOrder(length=2, seed=0, shuffle=False)
    feed = Feed(dataset=IDS[1:3], order=order, plan=plan, rules=BatchRules(collate=padded))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"samples 0, 1 of the dataset has 14 tokens .* have the data_collator pad"):
        feed.fetch(plan.microbatch(0, 0, 0))


def test_a_stream_has_no_budget_of_tokens() -> None:
    config = load_config({"batch": {"tokens": 64}, "run": {"max_steps": 3}})
    with pytest.raises(ConfigError, match=r"batch\.tokens: 64 needs the lengths .* is a stream; set batch\.micro_size"):
        _make_streamed(iter(IDS), config)


def test_an_evaluation_has_the_budget_of_tokens_unless_it_has_a_size() -> None:
    budget = {"global_size": 6, "tokens": 14}
    found = feeds(RunData(train=IDS), batch=budget).evaluation(documents(*LENGTHS))
    assert found.plan.blocks is not None
    assert found.plan.blocks(0) == ((0,), (1,), (2,), (3,), (4,), (5,))  # of 8 tokens with their padding
    assert feeds(RunData(train=IDS), batch={**budget, "eval_micro_size": 2}).evaluation(IDS).plan.blocks is None


def test_the_order_has_the_seed_of_the_data_or_else_of_the_run() -> None:
    for sections, seed, shuffle in (
        ({"run": {"seed": 5}}, 5, True),
        ({"run": {"seed": 5}, "data": {"seed": 0, "shuffle": False}}, 0, False),
    ):
        order = feeds(RunData(train=ROWS), **sections).train().order  # type: ignore[union-attr]
        assert (order.length, order.seed, order.shuffle, order.endless, order.parts) == (10, seed, shuffle, False, ())
    assert feeds(RunData(train=None)).train() is None
    stream: Any = feeds(RunData(train=STREAM)).train()
    assert (stream.order.length, stream.order.endless) == (4, True)
    mixed: Any = feeds(RunData(train=MixedDataset([tokens(1, 2), tokens(3, 4, 5, 6)], [0.5, 1.0]))).train()
    assert (mixed.order.length, mixed.order.parts) == (3, ((1, 1), (2, 2)))


def test_each_part_has_to_fit_the_vocabulary() -> None:
    data = RunData(train=MixedDataset([tokens(1, 2), tokens(3, 9)], [1.0, 1.0]))
    assert feeds(data, 10).train() is not None
    with pytest.raises(DataError, match="the text has token id 9 but the model's vocabulary has 9 tokens"):
        feeds(data, 9).train()


def test_ranks_that_share_a_batch_have_to_hold_the_same() -> None:
    """A mesh of four ranks stands for one: two pairs of ranks, each with a batch of its own."""

    def rows(*batches: list[dict[str, Any]]) -> list[list[int]]:
        found: list[list[int]] = []
        for rank, each in enumerate(batches):
            world = SimpleNamespace(ranks=range(1), gather_integers=lambda own: found.append(own) or [own])
            require_same_batches(each, SimpleNamespace(data_index=rank // 2, world=world))  # type: ignore[arg-type]
        return found

    def check(*batches: list[dict[str, Any]]) -> None:
        world = SimpleNamespace(ranks=range(4), gather_integers=lambda own: rows(*batches))
        require_same_batches(batches[0], SimpleNamespace(data_index=0, rank=0, world=world))  # type: ignore[arg-type]

    ids = torch.arange(6)
    one, other = [{"x": ids, "y": ids}], [{"x": ids + 1}]
    check(one, [{"y": ids, "x": ids}], other, other)
    for wrong in ([{"x": ids, "y": ids + 1}], [{"x": ids, "y": ids.view(2, 3)}], [*one, *one], [{"x": ids}]):
        with pytest.raises(DataError, match="rank 1 got other data than rank 0, and they compute one batch together"):
            check(one, wrong, other, one)
