"""The cache of keys and values: what its rows hold while others come and leave, and how its buffers grow."""

import random
from typing import Any

import pytest
import torch
import transformers as tf

from tests.support.trainer_cases import gpt2, llama
from zeromesh.trainer.generation.row_cache import RowCache, layers_of, token_bytes

HEADS, WIDTH = 2, 3


def appended(cache: RowCache, rows: int, columns: int, draw: torch.Generator) -> list[list[torch.Tensor]]:
    """Append random keys and values to all layers, as a forward does; returns all columns of each layer."""
    cache.make_room(columns)
    found = []
    for layer in cache.layers:
        states = [torch.rand(rows, HEADS, columns, WIDTH, generator=draw) for _ in range(2)]
        found.append([each.clone() for each in layer.update(*states)])
        assert all(torch.equal(all_[:, :, -columns:], new) for all_, new in zip(found[-1], states, strict=True))
        assert layer.get_mask_sizes(columns) == (cache.columns.width + columns, 0)
    cache.record_columns(rows, columns)
    return found


def test_rows_keep_their_tokens_while_others_come_and_leave() -> None:
    draw, generator = random.Random(4), torch.Generator().manual_seed(4)
    cache, held = RowCache(2), list[torch.Tensor]()  # Of each row [layers, 2, heads, tokens, width].
    for _ in range(150):
        choice = draw.random()
        if choice < 0.3 and len(held) < 5:
            lengths = [draw.randrange(0, 30) for _ in range(draw.randrange(1, 6 - len(held)))]
            other = RowCache(2)
            new = [appended(other, len(lengths), max(lengths), generator) for _ in range(max(lengths) > 0)]
            cache.merge(other, lengths, most_rows=5)
            for row, length in enumerate(lengths):
                parts = [torch.stack([each[row, :, :length] for each in layer]) for layer in new[0]] if new else []
                held.append(torch.stack(parts) if parts else torch.empty(2, 2, HEADS, 0, WIDTH))
        elif choice < 0.45 and held:
            row = draw.randrange(len(held))
            cache.remove(row)
            held[row] = held[-1]
            held.pop()
        elif held:
            found = appended(cache, len(held), 1, generator)
            for row, before in enumerate(held):
                whole = torch.stack([torch.stack([each[row] for each in layer]) for layer in found])
                padding = whole.shape[3] - before.shape[3] - 1
                assert torch.equal(whole[:, :, :, padding:-1], before)
                assert not whole[:, :, :, :padding].any()
                held[row] = whole[:, :, :, padding:]
        columns = cache.columns
        assert columns.lengths == [each.shape[3] for each in held]
        assert columns.width == cache.get_seq_length() == max(columns.lengths, default=0)
        assert columns.width <= columns.end <= columns.capacity
        assert all(len(buffer) <= 5 for layer in cache.layers for buffer in layer.buffers)
        assert held or columns.end == 0


@pytest.mark.parametrize(
    ("width", "end", "new", "wanted"),
    [
        (10, 60, 4, (60, 64)),
        (10, 60, 5, (10, 64)),
        (44, 60, 5, (44, 96)),
        (43, 60, 5, (43, 64)),
        (60, 60, 5, (60, 96)),
        (60, 60, 90, (60, 150)),
    ],
)
def test_columns_are_reclaimed_or_grow_by_half(width: int, end: int, new: int, wanted: tuple[int, int]) -> None:
    """With 64 columns at first, the column at which rows end and the capacity."""
    cache, generator = RowCache(1), torch.Generator().manual_seed(0)
    appended(cache, 1, width, generator)
    kept = cache.layers[0].buffers[0][:1, :, :width].clone()
    cache._reallocate(cache, rows=None, capacity=64, end=end)
    cache.make_room(new)
    assert (cache.columns.end, cache.columns.capacity) == wanted
    found = cache.layers[0].buffers[0]
    assert found.shape[2] == wanted[1]
    assert torch.equal(found[:1, :, wanted[0] - width : wanted[0]], kept)


def test_rows_double_up_to_their_limit() -> None:
    cache, sizes = RowCache(1), []
    for _ in range(7):
        other = RowCache(1)
        appended(other, 1, 3, torch.Generator().manual_seed(0))
        cache.merge(other, [3], most_rows=7)
        sizes.append(len(cache.layers[0].buffers[0]))
    assert sizes == [1, 2, 4, 4, 7, 7, 7]
    assert cache.columns.capacity == 67


SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
LATENT = tf.DeepseekV3Config(
    **SIZES, num_key_value_heads=4, num_hidden_layers=3, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
    n_routed_experts=4, num_experts_per_tok=1, n_group=1, topk_group=1, moe_intermediate_size=8,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tensor", "stages", "dtype", "nbytes"),
    [
        (llama().config, 1, 1, torch.float32, 2 * 2 * 16 * 4),
        (llama().config, 2, 1, torch.float32, 2 * 1 * 16 * 4),
        (llama().config, 4, 1, torch.float32, 2 * 1 * 16 * 4),
        (llama(num_hidden_layers=5).config, 1, 2, torch.bfloat16, 3 * 2 * 16 * 2),
        (llama(head_dim=12).config, 1, 2, torch.float64, 1 * 2 * 24 * 8),
        (gpt2().config, 1, 1, torch.float32, 2 * 4 * 16 * 4),
        (LATENT, 1, 1, torch.float32, 3 * 4 * (12 + 6) * 4),
    ],
)
def test_bytes_of_a_token(config: Any, tensor: int, stages: int, dtype: torch.dtype, nbytes: int) -> None:
    assert token_bytes(config, tensor, stages, dtype) == nbytes


def test_models_whose_layers_have_keys_and_values_alone() -> None:
    assert layers_of(llama(num_hidden_layers=3).config) == 3
    assert layers_of(tf.MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=4)) == 2
    assert layers_of(tf.MambaConfig(vocab_size=48, hidden_size=16, num_hidden_layers=1)) is None
