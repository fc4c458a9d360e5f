"""The implementation of attention, and what flash and flex attention are told of packed documents.

Flash attention has no CPU kernel: a stand-in has transformers' own function call it, and computes what such a kernel does.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.architectures import tiny
from tests.support.text_files import one_rank
from zeromesh.errors import ConfigError
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.models import prepare
from zeromesh.trainer.models.prepare import _KEPT_NAMES, use_attention, with_documents

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
STAND_IN = "stand_in_for_flash"
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7]])


def llama(**fields: Any) -> Any:
    torch.manual_seed(0)
    return tiny("llama", hidden_size=16, num_attention_heads=2, vocab_size=32, use_cache=False, **fields)


@pytest.mark.parametrize(
    ("name", "device", "compute", "packages", "words"),
    [
        ("flash_attention_2", CPU, torch.bfloat16, True, "this run on CPU; take sdpa"),
        ("flash_attention_2", GPU, torch.float32, True, "precision.compute is float32"),
        ("flash_attention_2", GPU, torch.bfloat16, False, "pip install flash-attn"),
        ("flash_attention_3", GPU, torch.bfloat16, False, "pip install flash-attn-3"),
        ("flex_attention", CPU, torch.bfloat16, True, "no backward on CPUs"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: Any, device: torch.device, compute: torch.dtype, packages: bool, words: str
) -> None:
    monkeypatch.setattr(prepare, "is_kernels_available", lambda: packages)
    with pytest.raises(ConfigError, match=words):
        use_attention(llama(), name, compute, device)


def test_the_choice_is_made_and_undone() -> None:
    model = llama()
    undo = use_attention(model, "eager", torch.float32, CPU)
    assert model.model.layers[0].self_attn.config._attn_implementation == "eager"
    undo()
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ConfigError, match="no model of transformers"):
        use_attention(torch.nn.Linear(2, 2), "eager", torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"allowed .*eager.*sdpa.*flash_attention_2.*flash_attention_3.*flex"):
        load_config({"model": {"attention": "fast"}})


def test_flex_attention_gets_a_mask_of_blocks_by_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "transformers.masking_utils.create_block_mask", lambda mask_mod, **_: SimpleNamespace(mask_mod=mask_mod)
    )
    made = create_causal_mask(
        config=llama(attn_implementation="flex_attention").config,
        inputs_embeds=torch.zeros(2, 8, 16),
        attention_mask=None,
        past_key_values=None,
        position_ids=POSITIONS,
    )
    at = torch.arange(8)
    for row, expected in enumerate(([1, 2, 3, 1, 2, 3, 4, 1], [1, 2, 3, 4, 5, 6, 7, 8])):
        seen = made.mask_mod(torch.tensor(row), torch.tensor(0), at[:, None], at[None, :])
        assert seen.sum(1).tolist() == expected


def by_documents(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **told: Any) -> tuple[Any, None]:
    """What flash attention computes of sequences, or of the documents that it is told of."""
    assert mask is None
    rows, heads, length, size = q.shape
    ends = told["cu_seq_lens_q"] if "cu_seq_lens_q" in told else length * torch.arange(rows + 1)
    if "cu_seq_lens_q" in told:
        assert ends.dtype == torch.int32
        assert told["max_length_q"] == told["max_length_k"] == int(ends.diff().max())
        SEEN.append(len(ends) - 1)
    flat = [each.transpose(1, 2).reshape(rows * length, -1, size).transpose(0, 1) for each in (q, k, v)]
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(each[None, :, start:end] for each in flat), is_causal=True, scale=scaling
        )
        for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]
    return torch.cat(parts, dim=2)[0].transpose(0, 1).reshape(rows, length, heads, size), None


SEEN: list[int] = []
"""The documents of each call that was told of them."""


@pytest.fixture
def stand_in() -> Iterator[None]:
    tf.AttentionInterface.register(STAND_IN, by_documents)
    tf.AttentionMaskInterface.register(STAND_IN, flash_attention_mask)
    yield
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        functions._global_mapping.pop(STAND_IN)
    SEEN.clear()


@pytest.mark.usefixtures("stand_in")
def test_flash_attention_trains_on_packed_documents_as_sdpa_does(tmp_path: Path) -> None:
    ids = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": each, "labels": each, "position_ids": POSITIONS[n % 2]} for n, each in enumerate(ids)]
    losses = {}
    for name in ("sdpa", STAND_IN):
        sections = {"batch": {"global_size": 4}, "run": {"name": name}, "data": {"shuffle": False}}
        model = llama()
        model.config._attn_implementation_internal = name  # transformers would import a package of the name.
        with one_rank(tmp_path, model, data, precision={"compute": "float32"}, **sections) as trainer:
            losses[name] = trainer.fit().losses
    # Each layer, microbatch and step: three documents in one sequence, one in the other.
    assert SEEN == [4] * (2 * 2 * 2)
    assert losses[STAND_IN] == pytest.approx(losses["sdpa"], rel=1e-6)


def test_batches_without_packed_documents_stay_as_they_are() -> None:
    flash = SimpleNamespace(_attn_implementation="flash_attention_2")
    model = llama()
    batch = {"position_ids": POSITIONS}
    assert with_documents(model, batch) is batch  # sdpa
    object.__setattr__(model, "config", flash)
    told = partial(with_documents, model)
    for other in (
        {"input_ids": POSITIONS},
        {"position_ids": POSITIONS[1:]},
        {**batch, "attention_mask": POSITIONS},
        {"position_ids": POSITIONS.expand(3, 2, 8)},
    ):
        assert told(other) is other
    assert told(batch)["cu_seq_lens_q"].tolist() == [0, 3, 7, 8, 16]
    assert told({"position_ids": POSITIONS + 5})["cu_seq_lens_k"].tolist() == [0, 3, 7, 8, 16]


def test_selective_recomputation_keeps_results_of_flash_attention() -> None:
    assert {"flash_attn::_flash_attn_varlen_forward", "flash_attn_3::_flash_attn_forward"} <= set(_KEPT_NAMES)
