"""Training on packed documents is training on each document alone, in float64; and the masks of batches that are in force."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import create_causal_mask

import zeromesh
from tests.support.architectures import small_model
from tests.support.text_files import one_rank
from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.attention import packed_attention
from zeromesh.trainer.attention.packed_attention import DocumentMask, PackedAttention
from zeromesh.trainer.models.small_copy import perturb, whole_passes_in_float64

KV = {"num_key_value_heads": 2, "head_dim": 8}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LENGTHS = ((9, 4, 7), (20,), (1, 12, 7), (3, 17))
RATE = 0.1


def samples() -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Sequences of several documents, and the documents."""
    generator = torch.Generator().manual_seed(3)
    packed, alone = [], []
    for lengths in LENGTHS:
        documents = [torch.randint(5, 96, (length,), generator=generator) for length in lengths]
        labels = [torch.cat([torch.tensor([-100]), each[1:]]) for each in documents]
        positions = torch.cat([torch.arange(length) for length in lengths])
        packed.append({"input_ids": torch.cat(documents), "labels": torch.cat(labels), "position_ids": positions})
        alone += documents
    return packed, alone


def built(kind: str, fields: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = small_model(kind, vocab_size=96, **fields).double()
    perturb(model)
    model.config._experts_implementation = "eager"
    return model


@pytest.mark.parametrize(
    ("kind", "fields", "recomputed"),
    [
        ("llama", KV, "selective"),
        ("gpt_oss", {**KV, **EXPERTS, "sliding_window": 4}, "block"),
        ("gemma3_text", {**KV, "sliding_window": 4}, "none"),
        ("gemma2", {**KV, "sliding_window": 4}, "block"),
        ("deepseek_v3", LATENT, "none"),
        ("bloom", {}, "none"),
    ],
)
def test_packed_documents_train_as_each_alone(tmp_path: Path, kind: str, fields: dict[str, Any], recomputed: str) -> None:
    packed, alone = samples()
    model, plain = built(kind, fields), built(kind, fields)
    sections: dict[str, Any] = {
        "precision": {"compute": "float64", "master": "float64", "reduce": "float64"},
        "optimizer": {"name": "sgd", "lr": RATE, "momentum": 0.0, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "batch": {"global_size": 4, "micro_size": 2},
        "model": {"activation_checkpointing": recomputed},
        "data": {"shuffle": False, "separate_documents": True},
        "run": {"max_steps": 1, "clip_norm": 0.0},
        "checkpoint": {"every_steps": 0},
    }
    with whole_passes_in_float64(), one_rank(tmp_path, model, packed, **sections) as trainer:
        trainer.fit()
        trained = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    targets = sum(len(each) - 1 for each in alone)
    with whole_passes_in_float64():
        for each in alone:
            if len(each) > 1:
                logits = plain(input_ids=each[None], use_cache=False).logits[0, :-1]
                (nn.functional.cross_entropy(logits, each[1:], reduction="sum") / targets).backward()
    for name, parameter in plain.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close((parameter.detach() - trained[name]) / RATE, gradient, rtol=1e-8, atol=1e-10, msg=name)


def packed_batch(**others: Any) -> dict[str, Any]:
    return {"input_ids": torch.arange(5, 25).view(2, 10), "position_ids": torch.tensor([[*range(4), *range(6)]] * 2), **others}


class Sizes(TorchDispatchMode):
    """The elements of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(each.numel() for each in tree_leaves(found) if isinstance(each, Tensor))])
        return found


@pytest.mark.parametrize(("kind", "fields"), [("llama", KV), ("gpt_oss", {**KV, **EXPERTS, "sliding_window": 4})])
def test_no_scores_of_whole_sequences_are_made(kind: str, fields: dict[str, Any]) -> None:
    """1024 tokens of 32 documents: with a mask of the batch the smallest tensor of scores has 1024 x 1024 elements."""
    model = small_model(kind, vocab_size=96, **fields)
    ids = torch.randint(96, (1, 1024))
    batch = {"input_ids": ids, "position_ids": torch.arange(32).repeat(1, 32)}
    with PackedAttention(batch).in_force(), Sizes() as sizes:
        model(**batch, use_cache=False).logits.sum().backward()
    assert sizes.largest < 1024 * 1024 / 4


@pytest.mark.parametrize("others", [{}, {"input_ids": None, "inputs_embeds": torch.zeros(2, 10, 8)}])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_mask_that_a_model_looks_into_is_the_mask(rows: int, others: dict[str, Any]) -> None:
    """Also where one row of positions is that of all sequences."""
    batch = packed_batch(**others)
    batch["position_ids"] = batch["position_ids"][:rows]
    config = tf.LlamaConfig(attn_implementation="sdpa")
    with PackedAttention(batch).in_force():
        mask = create_causal_mask(config, torch.zeros(2, 10, 8), None, None)
    assert isinstance(mask, DocumentMask)
    assert mask.shape == (2, 1, 10, 10)
    places = torch.arange(10)
    wanted = (places[:, None] >= places) & ((places[:, None] < 4) == (places < 4))
    assert torch.equal(mask & True, wanted.expand(2, 1, 10, 10))
    assert not isinstance(mask[:, :, :, :5], DocumentMask)
    assert create_causal_mask(config, torch.zeros(2, 10, 8), None, None) is None  # Outside, masks are the library's.


def test_masks_of_functions_of_others_are_within_documents() -> None:
    """What a mask function lets through besides, here all keys, is not let through to another document."""
    config = tf.LlamaConfig(attn_implementation="sdpa")
    with PackedAttention(packed_batch()).in_force():
        found = create_causal_mask(config, torch.zeros(2, 10, 8), None, None, or_mask_function=lambda b, h, q, k: k >= 0)
    same = (torch.arange(10)[:, None] < 4) == (torch.arange(10) < 4)
    assert not isinstance(found, DocumentMask)
    assert torch.equal(found, same.expand(2, 1, 10, 10))


def test_a_batch_on_a_device_asks_it_nothing() -> None:
    """The host knows that a mask pads nothing; one that pads is a mask, whose padding the library does not look for."""
    config = tf.LlamaConfig(attn_implementation="sdpa")
    full, padded = (torch.ones(2, 10, dtype=torch.long), torch.ones(2, 10, dtype=torch.long).index_fill(1, torch.tensor(9), 0))
    for given in (full, padded):
        attention = PackedAttention({"attention_mask": given}, on_device=True)
        with attention.in_force(), patch("transformers.masking_utils.fast_all", side_effect=AssertionError):
            mask = create_causal_mask(config, torch.zeros(2, 10, 8), given, None)
        assert (mask is None) == (given is full)


def test_dropout_and_softcaps_are_the_models_own() -> None:
    """Ours has neither, so a training step with dropout draws as the model's own attention does."""
    model = small_model("llama", vocab_size=96, attention_dropout=0.5, **KV).train()
    batch = packed_batch()
    with PackedAttention(batch).in_force(), patch.object(packed_attention, "document_attention", side_effect=AssertionError):
        model(**batch, use_cache=False)


def test_users_position_ids_are_tried_too(tmp_path: Path) -> None:
    """A dataset of the user's own packs documents for a model that cannot keep them apart."""
    packed, _ = samples()
    model = small_model("mamba", vocab_size=96, state_size=4)
    with (
        one_rank(tmp_path, model, packed, batch={"global_size": 4}) as trainer,
        pytest.raises(ConfigError, match=r"data.separate_documents: MambaForCausalLM .* a MambaMixer"),
    ):
        trainer.fit()


@pytest.mark.parametrize("by_place", [False, True], ids=["by name", "by place"])
def test_loops_of_ones_own_keep_documents_apart(by_place: bool) -> None:
    model, plain = built("gpt_oss", {**KV, **EXPERTS}), built("gpt_oss", {**KV, **EXPERTS})
    batch = packed_batch(use_cache=False)
    weights = torch.randn(2, 10, 96, dtype=torch.float64)
    sharded, optimizer = zeromesh.shard(model, torch.optim.SGD(model.parameters(), lr=RATE), stage=3)
    assert "position_ids" in inspect.signature(sharded.forward).parameters
    with whole_passes_in_float64():
        given = (batch["input_ids"], None, batch["position_ids"]) if by_place else ()
        (sharded(*given, **({} if given else batch)).logits * weights).sum().backward()
        optimizer.step()
        for begin, end in ((0, 4), (4, 10)):
            alone = plain(input_ids=batch["input_ids"][:, begin:end], use_cache=False).logits
            (alone * weights[:, begin:end]).sum().backward()
    zeromesh.unshard(sharded)
    trained = dict(sharded.named_parameters())
    for name, parameter in plain.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(trained[name], parameter - RATE * gradient, rtol=1e-8, atol=1e-10, msg=name)


def test_loops_of_ones_own_are_refused_what_mixes() -> None:
    model, _ = zeromesh.shard(small_model("qwen3_next", vocab_size=96, **KV, **LINEAR))
    with pytest.raises(ConfigError, match="a Qwen3NextGatedDeltaNet"):
        model(**packed_batch())
    zeromesh.unshard(model)


CALLS: dict[str, tuple[list[int], int]] = {  # Positions, and the length of the mask; caches have five tokens.
    "positions jump": ([0, 1, 41, 42], 4),
    "positions are shared": ([0, 1, 1, 2], 4),
    "tokens on a cache": ([5, 6, 7, 8], 9),
    "a token on a cache": ([5], 6),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_without_documents_are_the_models_own(name: str) -> None:
    """Neither jumps nor tokens that share a position begin a document, and tokens on a cache have none to be told."""
    fields, (positions, length) = {**KV, "max_position_embeddings": 64}, CALLS[name]
    call = {"attention_mask": torch.ones(2, length).long(), "position_ids": torch.tensor([positions] * 2)}
    ids = torch.randint(5, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    found = []
    for model in (built("llama", fields), zeromesh.shard(built("llama", fields))[0]):
        with torch.no_grad():
            tokens = ids[:, 5 : 5 + call["position_ids"].shape[1]]
            cache = {"past_key_values": model(ids[:, :5]).past_key_values} if "cache" in name else {}
            found.append(model(input_ids=tokens, **call, **cache, use_cache=bool(cache)).logits)
    zeromesh.unshard(model)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_ranks_that_share_sequences_take_no_cache() -> None:
    shares: Any = SimpleNamespace(multiple=4, spans=lambda length: ((0, length // 2),))
    with pytest.raises(DataError, match=r"^past_key_values were given, which parallel.context does not take"):
        PackedAttention({"input_ids": torch.ones(2, 4).long(), "past_key_values": object()}, shares=shares)
