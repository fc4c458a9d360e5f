"""Samples to batches: what is stacked, what is counted, and errors that name the sample."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorForLanguageModeling, default_data_collator

from tests.support.text_files import word_tokenizer
from zeromesh.errors import DataError
from zeromesh.trainer.data.collate import BatchRules, check_dataset, count_targets, default_collate, without_padding
from zeromesh.trainer.data.loader import Feed
from zeromesh.trainer.data.sampler import BatchPlan, SampleOrder

ORDER = SampleOrder(length=4, seed=0, shuffle=False)
PLAN = BatchPlan(global_size=4, micro_size=2, data_ranks=2)


def check_first_batch(dataset: Any, order: SampleOrder = ORDER, plan: BatchPlan = PLAN, **rules: Any) -> None:
    Feed(dataset=dataset, order=order, plan=plan, rules=BatchRules(**rules)).first_batch()


def check(field: str, values: list[Any], *, causal: bool = True) -> Callable[[], None]:
    """Samples 7 and 8 with a field, for a model of 10 tokens, or of 3 classes."""
    sizes = {"vocab_size": 10} if causal else {"vocab_size": None, "classes": 3}
    return lambda: BatchRules(causal=causal, **sizes).check({field: torch.tensor(values)}, [7, 8])


def stack(*samples: Any) -> Callable[[], Any]:
    return lambda: default_collate(samples, [7, 8])


def test_lists_arrays_tensors_and_numbers_are_stacked_as_transformers_does() -> None:
    samples = [
        {"input_ids": [i, 2], "pixels": np.ones((2, 3), dtype=np.float32) * i, "x": torch.tensor(i), "label": i}
        | {"weight": 0.5, "text": "dropped", "nothing": None}
        for i in range(3)
    ]
    batch, expected = default_collate(samples, range(3)), default_data_collator(samples)
    assert set(batch) == set(expected)
    for field, value in batch.items():
        assert (value.dtype, value.tolist()) == (expected[field].dtype, expected[field].tolist()), field


def test_mappings_that_are_no_dicts_wide_unsigned_arrays_and_rows_of_datasets_are_taken() -> None:
    batch = default_collate([BatchEncoding({"input_ids": np.asarray([1, 65535], dtype=np.uint16)})], [0])
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"].tolist() == [[1, 65535]]
    assert default_collate([{"x": np.asarray([255], dtype=np.uint8)}], [0])["x"].dtype == torch.uint8
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "text": ["a", "b"]})
    check_dataset(rows)
    assert default_collate([rows[0], rows[1]], [0, 1])["input_ids"].tolist() == [[1, 2], [3, 4]]
    assert default_collate([{"label_ids": 3}], [0])["labels"].tolist() == [3]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            stack({"input_ids": [1, 2]}, {"input_ids": [1, 2, 3]}),
            r"sample 8: field 'input_ids' has shape \[3\], but that of sample 7.* has \[2\]; pad or cut",
        ),
        (stack({"a": 1, "b": 2}, {"a": 1}), r"sample 8 has no numbers in 'b', as sample 7 has; it has 'a' \(int\)"),
        (stack({"a": 1}, {"a": 1, "b": 2}), r"sample 7 has no numbers in 'b', as sample 8 has; it has 'a' \(int\)"),
        (stack({"a": 1, "b": None}, {"a": 1, "b": 2}), r"sample 7 has no numbers in 'b'.*'b' \(NoneType\)"),
        (stack((1, 2), (3, 4)), "sample 7 is a tuple; give mappings"),
        (stack({"a": [[1], [1, 2]]}, {"a": [[1], [1]]}), r"sample 7: field 'a' \(list\) is no array"),
        (stack({"a": {}}, {"a": {}}), r"field 'a' \(dict\) is no array of numbers"),
        (stack({"text": "x"}, {"text": "y"}), r"sample 7 has no field that holds numbers: 'text' \(str\)"),
        (check("input_ids", [[1, 2], [3, 10]]), r"sample 8: input_ids\[1\] is 10, .* has 10 tokens"),
        (check("input_ids", [[1, 2], [-1, 3]]), r"sample 8: input_ids\[0\] is -1"),
        (check("input_ids", [[1, 2], [-100, 3]]), r"sample 8: input_ids\[0\] is -100, .* \(ids 0 to 9\); use the model's own"),
        (lambda: check_dataset("rows.csv"), "train_dataset is 'rows.csv'; give a dataset"),
        (
            lambda: BatchRules(causal=True).check(
                {"input_ids": torch.ones(2, 3).long(), "labels": torch.ones(2, 2).long()}, [7, 8]
            ),
            r"labels of samples 7, 8 have shape \[2, 2\], and input_ids \[2, 3\]",
        ),
        (check("labels", [[1, -100], [3, -1]]), r"sample 8: labels\[1\] is -1.*-100 for no target"),
        (check("input_ids", [1, 2, 12]), r"one of samples 7, 8: input_ids\[2\] is 12"),
        (check("input_ids", [[0.0, 0.0], [0.0, 0.0]]), r"input_ids of samples 7, 8 are torch.float32"),
        (
            check("labels", [0, 5], causal=False),
            r"sample 8: labels is 5, but the model's head has 3 classes \(labels 0 to 2, and -100 for no target\)",
        ),
        (check("labels", [-1, 0], causal=False), r"sample 7: labels is -1"),
        (check("labels", [[0, -100, 3], [1, 2, 0]], causal=False), r"sample 7: labels\[2\] is 3"),
        (
            check("labels", [0.0, 1.0], causal=False),
            "labels of samples 7, 8 are torch.float32; classes are integers, and a model with num_labels 1",
        ),
        (lambda: check_dataset([]), "is empty"),
        (lambda: check_dataset({"train": [1], "test": [2]}), r"a mapping of splits \('train', 'test'\)"),
        (lambda: check_dataset(iter([1, 2])), "without length or indexing"),
        (lambda: check_dataset(DataLoader([1, 2], 2), name="eval_dataset"), "eval_dataset is a DataLoader, whose items"),
        (lambda: count_targets(torch.tensor([1, 2]), causal=True), r"\[batch, sequence\]; these have shape \[2\]"),
        (lambda: BatchRules(collate=list).make_batch([1, 2], [0, 1]), "data_collator gave a list for samples 0, 1"),
    ],
)
def test_samples_batches_and_datasets_that_cannot_be_used_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        call()


def test_targets_are_counted_as_the_loss_counts_them() -> None:
    labels = torch.tensor([[5, -100, 7], [-100, -100, 1]])
    assert count_targets(labels, causal=True) == 2
    assert count_targets(labels, causal=False) == 3
    assert count_targets(torch.tensor([1, 0, -100]), causal=False) == 2
    assert count_targets(torch.tensor([[0.5, -100.0]]), causal=False) == 2


def test_class_labels_are_no_token_ids_and_an_unknown_vocabulary_has_no_end() -> None:
    batch = {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([50])}
    BatchRules(vocab_size=10).check(batch, [0])
    unlimited, causal = BatchRules(causal=True), BatchRules(vocab_size=10, causal=True)
    for ids in ([[1, 2], [3, 10]], [[1, 2], [-1, 3]], [1, 2, 12], [[0.0, 0.0]]):
        unlimited.check({"input_ids": torch.tensor(ids)}, [7, 8])
    causal.check({"input_ids": torch.tensor([[0, 9]]), "labels": torch.tensor([[-100, 9]])}, [0])
    causal.check({"input_ids": torch.empty(1, 0)}, [0])
    BatchRules(classes=2).check({"labels": torch.tensor([[0.0, 7.0]])}, [7])
    unlimited.check({"labels": torch.tensor([[1, -100], [3, -1]])}, [7, 8])


@pytest.mark.parametrize("collate", [None, default_data_collator])
def test_labels_that_are_text_are_named(collate: Any) -> None:
    samples = [{"input_ids": [1, 2], "label": name, "text": "words"} for name in ("good", "bad")]
    with pytest.raises(DataError, match=r"sample 1: label is text \('bad'\), .*class_encode_column\('label'\)"):
        BatchRules(collate=collate).make_batch(samples, [1, 0])
    numbered = [sample | {"labels": 1} for sample in samples]
    assert BatchRules().make_batch(numbered, [1, 0])["labels"].tolist() == [1, 1]


def test_a_microbatch_is_fetched_by_global_sample_index() -> None:
    dataset = [{"input_ids": [i, i]} for i in range(4)]
    microbatch = PLAN.microbatches(1, 1)[0]
    feed = Feed(dataset=dataset, order=ORDER, plan=PLAN, rules=BatchRules())
    assert feed.fetch(microbatch)["input_ids"].tolist() == [[2, 2], [3, 3]]
    with pytest.raises(DataError, match=r"sample 3: input_ids\[0\] is 3"):
        replace(feed, rules=BatchRules(vocab_size=3)).fetch(microbatch)


def test_a_collator_sees_the_fields_that_are_kept() -> None:
    rows = [{"x": index, "text": "a"} for index in range(4)]
    seen: list[Any] = []

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        seen.extend(samples)
        return {"x": torch.tensor([sample["x"] for sample in samples])}

    batch = BatchRules(collate=collate, named=frozenset({"x"}), unused=True).make_batch(rows, [1, 3])
    assert seen == [{"x": 1}, {"x": 3}]
    assert batch["x"].tolist() == [1, 3]
    with pytest.raises(DataError, match=r"sample 1 has no field that the model's forward takes: 'x' \(int\), 'text'"):
        BatchRules(collate=collate, named=frozenset(), unused=True).make_batch(rows, [1, 3])


def test_text_that_forward_takes_is_not_dropped() -> None:
    rules = BatchRules(named=frozenset({"x", "task"}))
    with pytest.raises(DataError, match="sample 1: task is text, which forward takes; pass a data_collator"):
        rules.make_batch([{"x": 1, "task": "a"}] * 2, [1])


SAMPLE = {"x": 1, "label": 2, "label_ids": 3, "labels": 4, "text": "a", "words": ["a"], "none": None, "special_tokens_mask": [0]}
SAMPLE |= {"y": 5.0, "tags": []}
NAMED = frozenset({"x", "labels"})
NUMBERS = {"x", "label", "label_ids", "labels", "special_tokens_mask"}
THEIRS = DataCollatorForLanguageModeling(word_tokenizer(["p", "a"], "a", pad_token="p"), mlm=False)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({}, {*SAMPLE}),
        ({"named": NAMED, "unused": False, "fields": NAMED}, {*SAMPLE}),
        ({"unused": True}, {*SAMPLE}),  # Of forward nothing is known.
        ({"named": NAMED, "unused": True}, {"x", "label", "label_ids", "labels"}),
        ({"named": NAMED, "unused": True, "collate": list}, {"x", "label", "label_ids", "labels"}),
        ({"named": NAMED}, {*NUMBERS, "y", "tags"}),
        ({"named": NAMED, "fields": NAMED}, NUMBERS),
        ({"named": NAMED, "fields": NAMED, "collate": THEIRS}, NUMBERS),
        ({"named": NAMED, "collate": THEIRS}, {*NUMBERS, "y", "tags"}),
        ({"named": NAMED, "fields": NAMED, "collate": list}, {*NUMBERS, "y", "tags"}),
        ({"named": NAMED, "collate": list}, {*SAMPLE}),
        ({"named": frozenset({"z", "labels"}), "fields": NAMED}, {*SAMPLE}),  # The collator makes the inputs.
    ],
)
def test_fields_that_a_collator_gets(rules: dict[str, Any], kept: set[str]) -> None:
    assert BatchRules(**rules).drop_fields(SAMPLE) == {name: SAMPLE[name] for name in SAMPLE if name in kept}


def test_labels_by_another_name_stay_where_forward_takes_labels() -> None:
    rules = BatchRules(named=NAMED, unused=True, fields=NAMED)
    batch = rules.make_batch([{"x": 1, "label": 2, "y": 3}], [0])
    assert {name: each.tolist() for name, each in batch.items()} == {"x": [1], "labels": [2]}
    assert rules.accepted({**batch, "y": batch["x"]}).keys() == {"x", "labels"}
    texts = BatchRules(collate=lambda rows: {"x": torch.tensor([len(row["label"]) for row in rows])})
    assert texts.make_batch([{"label": "two"}], [0])["x"].tolist() == [3]  # A collator of one's own may number them.


def test_an_error_of_the_user_s_code_says_which_samples_it_is_about() -> None:
    def fails(rows: list[Any]) -> Any:
        raise KeyError(f"{len(rows)}")

    def notes(rules: BatchRules, dataset: Any, indices: list[int]) -> list[str]:
        with pytest.raises((KeyError, DataError)) as raised:
            rules.make_batch(dataset, indices)
        return getattr(raised.value, "__notes__", [])

    rows = {4: {"x": 1}, 7: {"x": 2}, 8: {"z": 3}}
    assert notes(BatchRules(collate=fails), rows, [4, 7]) == ["in a batch of the samples 4, 7 of the dataset"]
    assert notes(BatchRules(), rows, [4, 5, 7]) == ["in sample 5 of the dataset"]
    assert notes(BatchRules(), rows, [4, 8]) == []  # It names the sample itself.


def test_columns_of_padding_are_cut_off() -> None:
    """By the mask, or in packed rows as the last document where that has no target; the length stays a multiple."""
    labels = torch.tensor([[-100, 5, 6, -100, -100, -100], [-100, 5, -100, -100, -100, -100]])
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])
    for batch in ({"labels": labels, "attention_mask": mask}, {"labels": labels, "position_ids": positions}):
        batch["input_ids"] = labels
        narrow, wide = without_padding(batch, 1), without_padding(batch, 4)
        assert torch.equal(narrow["labels"], labels[:, :3])
        assert wide["labels"].shape == (2, 4)
        assert "attention_mask" not in narrow
        assert ("attention_mask" in wide) == ("attention_mask" in batch)
    full = {"input_ids": labels, "labels": labels.clone(), "position_ids": positions}
    full["labels"][0, 3] = 5
    assert without_padding(full, 1)["labels"].shape == (2, 6)
    classes = without_padding({"input_ids": labels, "attention_mask": mask, "labels": torch.tensor([3, 4])}, 2)
    assert (list(classes["input_ids"].shape), classes["labels"].tolist()) == ([2, 4], [3, 4])
    cut = BatchRules(length_multiple=2).make_batch([{"input_ids": [5, 6, 7, 0, 0, 0], "attention_mask": [1] * 3 + [0] * 3}], [0])
    assert cut["input_ids"].tolist() == [[5, 6, 7, 0]]


def test_a_global_batch_without_targets_is_refused_before_training() -> None:
    masked: list[dict[str, list[int]]] = [{"input_ids": [1, 2], "labels": [7, -100]} for _ in range(4)]
    with pytest.raises(DataError, match="every label of the first 4 samples is -100"):
        check_first_batch(masked, causal=True)
    check_first_batch(masked, causal=False)
    masked[3]["labels"] = [-100, 7]
    check_first_batch(masked, causal=True)
    check_first_batch([{"x": 1.0}] * 4)  # A batch without labels is left to its loss.


def test_the_first_batch_is_checked_without_moving_the_random_state() -> None:
    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([sample["input_ids"] for sample in samples])
        return {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape) < 2, ids, -100)}

    before = torch.get_rng_state()
    dataset = [{"input_ids": [1, 2]} for _ in range(4)]
    check_first_batch(dataset, collate=collate, vocab_size=10, causal=True)
    assert torch.get_rng_state().equal(before)
    with pytest.raises(DataError, match=r"sample 0: input_ids\[1\] is 2"):
        check_first_batch(dataset, collate=collate, vocab_size=2, causal=True)


def test_a_collator_of_transformers_works() -> None:
    collate = DataCollatorForLanguageModeling(word_tokenizer(["p", "a"], "a", pad_token="p"), mlm=False)
    dataset = [{"input_ids": [1] * (i + 1)} for i in range(4)]
    batch = BatchRules(collate=collate, vocab_size=2, causal=True).make_batch(dataset, [0, 1])
    assert batch["input_ids"].tolist() == [[1, 0], [1, 1]]
    assert count_targets(batch["labels"], causal=True) == 1


def test_only_the_first_microbatch_is_looked_at() -> None:
    """At the start of a run, whatever the length of the data."""
    asked: list[int] = []

    class Long:
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            asked.append(index)
            return {"input_ids": [1, 2], "labels": [1, 2]}

    order = SampleOrder(length=10**9, seed=0, shuffle=False)
    plan = BatchPlan(global_size=10**9, micro_size=2, data_ranks=2)
    check_first_batch(Long(), order, plan, causal=True)
    assert asked == [0, 1]
