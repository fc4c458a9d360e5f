"""Tensor parallelism: divided models against whole ones, in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from tests.support.architectures import TINY, tiny
from tests.support.tables import row, tried
from tests.support.workers import Workers
from zeromesh.errors import LayoutError
from zeromesh.flat.layout import part_of
from zeromesh.intervals import balanced
from zeromesh.tensor.parallelize_module import check_blocks
from zeromesh.tensor.plan.attention_split import divide_heads
from zeromesh.tensor.plan.layer_plan import Style, TensorPlan
from zeromesh.tensor.plan.planner import parts_of, plan_tensor

MOST = ["llama", "llama-1kv", "llama-9-3", "gpt2", "qwen3", "gemma2", "mixtral"]
OTHERS = sorted(set(TINY) - set(MOST))


FULL, BOTH = pytest.mark.full, (False, True)
CHUNKED = "loss: cross entropy in chunks of tokens, equal to the model's own in a trial"
CHANGED = "loss: cross entropy in chunks of tokens, of logits changed by {}, equal to the model's own in a trial"
NOTES = {
    **dict.fromkeys(("llama", "bert", "modernbert", "t5"), CHUNKED),
    "gemma2": CHANGED.format("a factor of 1, capped at 0.5"),
    "granite": CHANGED.format("a factor of 0.125"),
    "cohere": CHANGED.format("a factor of 0.3"),
    "centred": "loss: the model's own, with all logits in memory, because ",
}
DIVIDED: tuple[Any, ...] = (
    (2, MOST, False),
    (2, OTHERS, False),
    (2, ["llama-9-3", "gpt2", "mixtral"], True),
    # As many ranks as heads: some have the same key-value head.
    (4, ["llama", "llama-1kv", "llama-9-3", "gpt2", "falcon"], False),
    (4, sorted(TINY), False, FULL),
    (4, sorted(TINY), True, FULL),
)
test_a_divided_model_is_the_whole_one = pytest.mark.sampled(8)(
    tried(
        "tensor_cases",
        [
            *(
                row(
                    *(ranks, "equals"),
                    *(marks or [FULL] * (models is OTHERS and not sequence)),
                    models=models,
                    sequence=sequence,
                    checkpointing=checkpointing,
                )
                for ranks, models, checkpointing, *marks in DIVIDED
                for sequence in BOTH
            ),
            *(
                row(2, "computes_otherwise", FULL, name=name, sequence=sequence, how=how)
                for how in ("block", "selective", "compile")
                for sequence in BOTH
                for name in ("llama", "gpt2")
            ),
            row(2, "learns_in_chunks", name="llama", sequence=False),
            row(2, "learns_in_chunks", name="gpt2", sequence=True),
            *(
                row(2, "losses_of_halves", dtype=dtype, chunk_tokens=chunk_tokens, bound=bound)
                for dtype, bound in (("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 0.02))
                for chunk_tokens in (4, 64)
            ),
            *(row(2, "learns", name=name, note=note) for name, note in NOTES.items()),
            *(row(2, "scores", name=name) for name in ("llama", "cohere", "gpt2")),
            *(row(2, "generates", names=["llama", "llama-1kv", "gpt2", "falcon-mq", "t5"], sequence=sequence) for sequence in BOTH),
            *(row(2, "narrow", name="llama", sequence=sequence) for sequence in BOTH),
            row(2, "frozen_and_restored"),
        ],
        folder=False,
        timeout=300.0,
    )
)


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(2, {"tensor": 2}), pytest.param(4, {"tensor": 2, "pipeline": 2}, marks=pytest.mark.full)]
)
def test_a_run_gathers_none_either(workers: Workers, tmp_path: Path, ranks: int, parallel: dict[str, int]) -> None:
    workers.run(ranks, "tensor_cases:trains", folder=str(tmp_path), parallel=parallel)


@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_is_the_same_where_all_have_the_same(workers: Workers, sequence: bool) -> None:
    first, second = workers.run(2, "tensor_cases:drops_out", sequence=sequence)
    for result in (first, second):
        assert result["again"]
        assert result["differs"] == [{}, {}]
    assert first["loss"] == second["loss"]
    assert first["after"] == second["after"]
    shapes = [shape for shape, _ in first["masks"]]
    assert shapes == [shape for shape, _ in second["masks"]]
    equal = [one == other for one, other in zip(first["masks"], second["masks"], strict=True)]
    # Embedding; attention, its output and the MLP of each of two blocks.
    assert equal == [True, *[False, not sequence, not sequence] * 2]
    assert shapes[0] == [2, 8, 32]
    assert shapes[1:4] == [[2, 2, 8, 8], *[[2, 4 if sequence else 8, 32]] * 2]
    masks = [mask for _, mask in first["masks"]]
    assert len(set(masks)) == len(masks)


def test_layers_that_read_one_input_sum_its_gradient_once(workers: Workers) -> None:
    for forward, backward in workers.run(2, "tensor_cases:counts_exchanges", name="llama", sequence=False):
        assert forward == ["all-reduce"] * 5  # embedding, and two of each block
        assert backward == ["all-reduce"] * 4
    for forward, backward in workers.run(2, "tensor_cases:counts_exchanges", name="llama", sequence=True):
        assert forward == ["all-reduce", *["all-gather", "reduce-scatter"] * 4, "all-gather"]
        # Of the row layer's output; of the inputs, which are gathered again, while their gradients are summed.
        assert backward == [*["all-gather", "all-gather", "reduce-scatter"] * 4, "all-gather"]


def test_there_is_no_more_to_a_plan_than_numbers() -> None:
    """Every element of a divided parameter is on one rank, or on all that share it."""
    for name in TINY:
        with torch.device("meta"):
            model = tiny(name)
        for size in (2, 3, 4):
            plan = plan_tensor(model, size)
            held = [parts_of(model, plan, rank, sequence=False) for rank in range(size)]
            for fqn, parameter in model.named_parameters():
                parts = [mine.get(fqn) for mine in held]
                counts = torch.zeros(parameter.shape, dtype=torch.int64)
                for rank, part in enumerate(parts):
                    assert (part is None) == (parts[0] is None), (name, fqn)
                    if part is not None and part.holders[0] == rank:
                        counts.view(-1)[part_of(torch.arange(counts.numel()).view(counts.shape), part.region).reshape(-1)] += 1
                if parts[0] is not None:
                    assert bool((counts == 1).all()), (name, size, fqn)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 12))
def test_heads_are_shared_out(keys: int, group: int, ranks: int) -> None:
    queries = keys * group
    assume(ranks <= queries)
    shares = divide_heads(queries, keys, ranks, "attention")
    assert [query for share in shares for query in range(share.queries.start, share.queries.end)] == list(range(queries))
    for share in shares:
        assert share.queries.length
        assert share.queries.length % share.keys.length == 0
        local = share.queries.length // share.keys.length  # queries of a local key-value head, as attention repeats it
        for number, query in enumerate(range(share.queries.start, share.queries.end)):
            assert share.keys.start + number // local == query // group


@given(st.integers(0, 200), st.integers(1, 12))
def test_shares_are_balanced(length: int, parts: int) -> None:
    shares = balanced(length, parts)
    assert [n for share in shares for n in range(share.start, share.end)] == list(range(length))
    assert max(share.length for share in shares) - min(share.length for share in shares) <= 1


def _on_meta(kind: str, **values: Any) -> Any:
    model = getattr(tf, kind)
    with torch.device("meta"):
        return model(model.config_class(**values))


def _llama(**changes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_attention_heads": 4, "num_hidden_layers": 1}
    return _on_meta("LlamaForCausalLM", **{**sizes, "vocab_size": 67, **changes})


_LONGCAT = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "num_layers": 1,
    "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "n_routed_experts": 4, "vocab_size": 64,
}  # fmt: skip
_MAMBA = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "state_size": 4}


def _value_embeds() -> Any:
    model = _llama()
    model.model.layers[0].self_attn.forward = lambda hidden_states, value_embeds=None, **others: hidden_states
    return model


@pytest.mark.parametrize(
    ("make", "size", "rules", "message"),
    [
        (_llama, 8, {}, "layers.0.self_attn: 4 query heads cannot be divided among 8 ranks; parallel.tensor may be at most 4"),
        (lambda: _llama(intermediate_size=3), 4, {}, "layers.0.mlp.gate_proj: too small to be divided among 4 ranks"),
        (_llama, 2, {"*.mlp.up": "colwise"}, "matches no module of LlamaForCausalLM; its modules are named like model.layers.0"),
        (_llama, 2, {"*.up_proj": "colwyse"}, "tensor-parallel rule '*.up_proj': there is no style 'colwyse'"),
        (_llama, 2, {"*.mlp": "colwise"}, "layers.0.mlp: a LlamaMLP cannot be divided; allowed are torch.nn.Linear"),
        (_llama, 2, {"*.k_proj": "replicate"}, "model.layers.0.self_attn.k_proj would be whole beside projections"),
        (lambda: _on_meta("LongcatFlashForCausalLM", **_LONGCAT), 2, {}, "identity_expert: every rank would add what this expert"),
        (_value_embeds, 2, {}, "layers.0.self_attn: its argument value_embeds is of all heads; set parallel"),
        (lambda: _on_meta("MambaForCausalLM", **_MAMBA), 2, {}, "blocks hold backbone.layers.*.mixer (MambaMixer); give rules"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), 2, {}, "there is no tensor-parallel plan for Sequential"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(make: Any, size: int, rules: dict[str, str], message: str) -> None:
    with pytest.raises(LayoutError) as raised:
        plan_tensor(make(), size, rules)
    assert message in str(raised.value)


def _styles(plan: TensorPlan) -> dict[str, Style]:
    return {layer.module: layer.style for layer in plan.layers}


def test_a_users_rules_go_first() -> None:
    plan = plan_tensor(_llama(), 2, {"*.mlp.*_proj": "replicate", "lm_head": "replicate"})
    styles = _styles(plan)
    assert "model.layers.0.mlp.up_proj" not in styles
    assert styles["model.embed_tokens"] is Style.EMBEDDING
    assert styles["model.layers.0.self_attn.q_proj"] is Style.COLUMN
    names = [*(f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")), "lm_head"]
    assert plan.notes == (f"whole on all tensor ranks: {', '.join(names)}",)


class Scaled(nn.Embedding):
    factor = 2.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.factor


class Shifted(nn.Embedding):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__(tokens, width)
        self.shift = nn.Parameter(torch.zeros(width))


class Compared(nn.Embedding):
    """Looks at the numbers of tokens."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (input != 3)[..., None]


@pytest.mark.parametrize(("kind", "divided"), [(Scaled, True), (Shifted, False), (Compared, False)])
def test_an_embedding_is_divided_where_it_gives_rows_alone(kind: type[nn.Embedding], divided: bool) -> None:
    for tied in (False, True):
        model = _llama(tie_word_embeddings=tied)
        model.set_input_embeddings(kind(*model.get_input_embeddings().weight.shape))
        model.tie_weights()
        plan = plan_tensor(model, 2)
        assert ("model.embed_tokens" in _styles(plan)) is divided
        assert any(f"embed_tokens ({kind.__name__}) is whole" in note for note in plan.notes) is not divided
        assert ("model.embed_tokens.weight" in parts_of(model, plan, 1, sequence=False)) is divided


def test_embeddings_that_are_tied_are_divided_together_or_not_at_all() -> None:
    tied = _llama(tie_word_embeddings=True)
    assert {"model.embed_tokens", "lm_head"} <= set(_styles(plan_tensor(tied, 2)))
    plan = plan_tensor(tied, 2, {"lm_head": "replicate"})
    assert not {"model.embed_tokens", "lm_head"} & set(_styles(plan))
    assert "model.embed_tokens and lm_head share a parameter that not all of them can divide" in plan.notes[0]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*.self_attn.*": "replicate"}, "model.layers.0 has no attention divided among ranks"),
        ({"*.mlp.up_proj": "replicate"}, "model.layers.0.mlp.up_proj (Linear) may need the whole sequence"),
        ({"*.self_attn.*": "replicate", "*.mlp.*": "replicate"}, "the plan divides no layer of its blocks (LlamaDecoderLayer)"),
    ],
)
def test_a_block_that_may_need_the_whole_sequence_gets_it(rules: dict[str, str], message: str) -> None:
    model = _llama()
    with pytest.raises(LayoutError) as raised:
        check_blocks(model, plan_tensor(model, 2, rules))
    assert message in str(raised.value)


def test_a_plain_module_by_a_users_rules() -> None:
    model = nn.ModuleDict({"up": nn.Linear(6, 10), "down": nn.Linear(10, 6)})
    parts = parts_of(model, plan_tensor(model, 2, {"up": "colwise", "down": "rowwise"}), 1, sequence=False)
    assert {name: part.region.local_shape for name, part in parts.items()} == {
        "up.weight": (5, 6), "up.bias": (5,), "down.weight": (6, 5),
    }  # fmt: skip


def test_a_key_value_head_of_several_ranks_has_partial_gradients() -> None:
    model = _llama(num_key_value_heads=2)
    parts = parts_of(model, plan_tensor(model, 4), 3, sequence=False)
    keys, queries = (parts[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "kq")
    assert (keys.holders, keys.partial, keys.region.local_shape) == ((2, 3), True, (8, 32))
    assert (queries.holders, queries.partial) == ((3,), False)
