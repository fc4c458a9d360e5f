"""Samples to batches: what is stacked, what is counted, and errors that name the sample."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, DataCollatorForLanguageModeling, default_data_collator

from zeromesh.errors import DataError
from zeromesh.trainer.data.collate import (
    BatchRules,
    check_batch,
    check_dataset,
    count_targets,
    default_collate,
    without_padding,
)
from zeromesh.trainer.data.feed import Feed
from zeromesh.trainer.data.sampler import BatchPlan, Microbatch, SampleOrder

ORDER = SampleOrder(length=4, seed=0, shuffle=False)
PLAN = BatchPlan(global_size=4, micro_size=2, data_ranks=2)


def fetch_microbatch(dataset: Any, order: SampleOrder, microbatch: Microbatch, **rules: Any) -> dict[str, Any]:
    return BatchRules(**rules).make_batch(dataset, list(map(order.dataset_index, microbatch.samples)))


def check_first_batch(dataset: Any, order: SampleOrder, plan: BatchPlan, **rules: Any) -> None:
    Feed(dataset=dataset, order=order, plan=plan, rules=BatchRules(**rules)).first_batch()


def test_lists_arrays_tensors_and_numbers_are_stacked_as_transformers_does() -> None:
    samples = [
        {
            "input_ids": [i, 2],
            "pixels": np.ones((2, 3), dtype=np.float32) * i,
            "x": torch.tensor(i),
            "label": i,
            "weight": 0.5,
            "text": "dropped",
            "nothing": None,
        }
        for i in range(3)
    ]
    batch = default_collate(samples, range(3))
    expected = default_data_collator(samples)
    assert set(batch) == set(expected)
    for field, value in batch.items():
        assert value.dtype == expected[field].dtype, field
        assert value.equal(expected[field]), field


def test_mappings_that_are_no_dicts_and_wide_unsigned_arrays_are_taken() -> None:
    batch = default_collate([BatchEncoding({"input_ids": np.asarray([1, 65535], dtype=np.uint16)})], [0])
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"].tolist() == [[1, 65535]]


def test_the_rows_of_a_hugging_face_dataset_are_taken() -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "text": ["a", "b"]})
    check_dataset(rows)
    assert default_collate([rows[0], rows[1]], [0, 1])["input_ids"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (
            [{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3]}],
            r"sample 8: field 'input_ids' has shape \[3\], but that of sample 7.* has \[2\]; pad or cut",
        ),
        ([{"a": 1, "b": 2}, {"a": 1}], r"sample 8 has no field 'b'.*'a' \(int\)"),
        ([(1, 2), (3, 4)], "sample 7 is a tuple; give mappings"),
        ([{"a": [[1], [1, 2]]}, {"a": [[1], [1]]}], r"sample 7: field 'a' \(list\) is no array"),
        ([{"a": {}}, {"a": {}}], r"field 'a' \(dict\) is no array of numbers"),
        ([{"text": "x"}, {"text": "y"}], r"sample 7 has no field that holds numbers: 'text' \(str\)"),
    ],
)
def test_samples_that_do_not_stack_are_named(samples: Sequence[Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        default_collate(samples, [7, 8])


def test_targets_are_counted_as_the_loss_counts_them() -> None:
    labels = torch.tensor([[5, -100, 7], [-100, -100, 1]])
    assert count_targets(labels, causal=True) == 2
    assert count_targets(labels, causal=False) == 3
    assert count_targets(torch.tensor([1, 0, -100]), causal=False) == 2
    assert count_targets(torch.tensor([[0.5, -100.0]]), causal=False) == 2
    with pytest.raises(DataError, match=r"\[batch, sequence\]; these have shape \[2\]"):
        count_targets(torch.tensor([1, 2]), causal=True)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"input_ids": torch.tensor([[1, 2], [3, 10]])}, r"sample 8: input_ids\[1\] is 10, .* has 10 tokens"),
        ({"input_ids": torch.tensor([[1, 2], [-1, 3]])}, r"sample 8: input_ids\[0\] is -1"),
        ({"labels": torch.tensor([[1, -100], [3, -1]])}, r"sample 8: labels\[1\] is -1.*-100 for no target"),
        ({"input_ids": torch.tensor([1, 2, 12])}, r"one of samples 7, 8: input_ids\[2\] is 12"),
        ({"input_ids": torch.zeros(2, 2)}, r"input_ids of samples 7, 8 are torch.float32"),
    ],
)
def test_ids_past_the_vocabulary_are_named(batch: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_batch(batch, vocab_size=10, causal=True, indices=[7, 8])
    check_batch(batch, vocab_size=None, causal=True, indices=[7, 8])


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (
            [0, 5],
            r"sample 8: labels is 5, but the model's head has 3 classes \(labels 0 to 2, and -100 for no target\)",
        ),
        ([-1, 0], r"sample 7: labels is -1"),
        ([[0, -100, 3], [1, 2, 0]], r"sample 7: labels\[2\] is 3"),
        ([0.0, 1.0], "labels of samples 7, 8 are torch.float32; classes are integers, and a model with num_labels 1"),
    ],
)
def test_labels_past_the_classes_are_named(labels: list[Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_batch({"labels": torch.tensor(labels)}, vocab_size=None, causal=False, indices=[7, 8], classes=3)


@pytest.mark.parametrize("collate", [None, default_data_collator])
def test_labels_that_are_text_are_named(collate: Any) -> None:
    samples = [{"input_ids": [1, 2], "label": name, "text": "words"} for name in ("good", "bad")]
    with pytest.raises(DataError, match=r"sample 1: label is text \('bad'\), .*class_encode_column\('label'\)"):
        BatchRules(collate=collate).make_batch(samples, [1, 0])
    numbered = [sample | {"labels": 1} for sample in samples]
    assert BatchRules().make_batch(numbered, [1, 0])["labels"].tolist() == [1, 1]


def test_class_labels_are_not_token_ids() -> None:
    batch = {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([50])}
    check_batch(batch, vocab_size=10, causal=False, indices=[0])


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ([], "is empty"),
        ({"train": [1], "test": [2]}, "a mapping of splits \\('train', 'test'\\)"),
        (iter([1, 2]), "without length or indexing"),
    ],
)
def test_datasets_that_cannot_be_dealt_are_refused(dataset: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_dataset(dataset)


def test_a_microbatch_is_fetched_by_global_sample_index() -> None:
    dataset = [{"input_ids": [i, i]} for i in range(4)]
    microbatch = PLAN.microbatches(1, 1)[0]
    assert fetch_microbatch(dataset, ORDER, microbatch)["input_ids"].tolist() == [[2, 2], [3, 3]]
    with pytest.raises(DataError, match=r"sample 3: input_ids\[0\] is 3"):
        fetch_microbatch(dataset, ORDER, microbatch, vocab_size=3)


def test_a_collator_sees_the_fields_that_are_kept() -> None:
    rows = [{"x": index, "text": "a"} for index in range(4)]
    microbatch = Microbatch(first_sample=1, samples=(1, 3), weight=1)
    order = SampleOrder(length=4, seed=0, shuffle=False)
    seen: list[Any] = []

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        seen.extend(samples)
        return {"x": torch.tensor([sample["x"] for sample in samples])}

    batch = fetch_microbatch(rows, order, microbatch, collate=collate, reduced=lambda row: {"x": row["x"]})
    assert seen == [{"x": 1}, {"x": 3}]
    assert batch["x"].tolist() == [1, 3]
    with pytest.raises(DataError, match=r"sample 1 has no field that the model's forward takes: 'x' \(int\), 'text'"):
        fetch_microbatch(rows, order, microbatch, collate=collate, reduced=lambda row: {})


def test_columns_of_padding_are_cut_off() -> None:
    """By the mask, or in packed rows as the last document where that has no target; the length stays a multiple."""
    labels = torch.tensor([[-100, 5, 6, -100, -100, -100], [-100, 5, -100, -100, -100, -100]])
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])
    for batch in ({"labels": labels, "attention_mask": mask}, {"labels": labels, "position_ids": positions}):
        batch["input_ids"] = labels
        assert torch.equal(without_padding(batch, 1)["labels"], labels[:, :3])
        assert without_padding(batch, 4)["labels"].shape == (2, 4)
    assert "attention_mask" not in without_padding({"input_ids": labels, "labels": labels, "attention_mask": mask}, 1)
    assert "attention_mask" in without_padding({"input_ids": labels, "labels": labels, "attention_mask": mask}, 4)
    full = {"input_ids": labels, "labels": labels.clone(), "position_ids": positions}
    full["labels"][0, -1] = 5
    assert without_padding(full, 1)["labels"].shape == (2, 6)


def test_a_collator_must_give_a_mapping() -> None:
    with pytest.raises(DataError, match="data_collator gave a list for samples 0, 1"):
        fetch_microbatch([1, 2, 3, 4], ORDER, PLAN.microbatches(0, 0)[0], collate=list)


def test_a_global_batch_without_targets_is_refused_before_training() -> None:
    masked: list[dict[str, list[int]]] = [{"input_ids": [1, 2], "labels": [7, -100]} for _ in range(4)]
    with pytest.raises(DataError, match="every label of the first 4 samples is -100"):
        check_first_batch(masked, ORDER, PLAN, causal=True)
    check_first_batch(masked, ORDER, PLAN, causal=False)
    masked[3]["labels"] = [-100, 7]
    check_first_batch(masked, ORDER, PLAN, causal=True)


def test_the_first_batch_is_checked_without_moving_the_random_state() -> None:
    class Masks:
        def __call__(self, samples: list[Any]) -> dict[str, torch.Tensor]:
            ids = torch.tensor([sample["input_ids"] for sample in samples])
            return {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape) < 2, ids, -100)}

    before = torch.get_rng_state()
    dataset = [{"input_ids": [1, 2]} for _ in range(4)]
    check_first_batch(dataset, ORDER, PLAN, collate=Masks(), vocab_size=10, causal=True)
    assert torch.get_rng_state().equal(before)
    with pytest.raises(DataError, match=r"sample 0: input_ids\[1\] is 2"):
        check_first_batch(dataset, ORDER, PLAN, collate=Masks(), vocab_size=2, causal=True)


def test_a_batch_without_labels_is_left_to_its_loss() -> None:
    check_first_batch([{"x": 1.0}] * 4, ORDER, PLAN)


def test_a_collator_of_transformers_works() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"p": 0, "a": 1}, unk_token="a")), pad_token="p"
    )
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    dataset = [{"input_ids": [1] * (i + 1)} for i in range(4)]
    batch = fetch_microbatch(dataset, ORDER, PLAN.microbatches(0, 0)[0], collate=collate, vocab_size=2, causal=True)
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
