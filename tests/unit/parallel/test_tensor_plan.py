"""Which features, attributes and parameters a rank of the tensor axis gets, and what its layers compute, without any other rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from zeromesh.comm.activation_collectives import Exchange
from zeromesh.errors import ConfigError, LayoutError, PhaseError
from zeromesh.intervals import Interval
from zeromesh.rng import seed_generators
from zeromesh.tensor.dropout_rng import ShardedRandomness
from zeromesh.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SequenceShares,
    SharedInput,
    lookup_sharded_embedding,
    project_latent,
    run_sharded_experts,
    sequence_dim,
)
from zeromesh.tensor.parallelize_module import Parallelized
from zeromesh.tensor.plan.attention_split import (
    AttentionDivision,
    count_heads,
    divide_heads,
    division_of,
    forward_source,
    intermediate_dims,
    is_transposed,
)
from zeromesh.tensor.plan.planner import LayerPlan, Style, TensorPlan, divides_by_shape, parts_of, plan_tensor, recognise_styles
from zeromesh.trainer.planning.tracing.meter import TracedExchange


def pairs(shares: Any) -> list[list[tuple[int, int]]]:
    return [[(each.start, each.end) for each in share] for share in shares]


def division(queries: int, keys: int, ranks: int) -> AttentionDivision:
    return AttentionDivision(queries=queries, keys=keys, shares=divide_heads(queries, keys, ranks, "attention"))


def test_heads_are_not_split() -> None:
    found = division(6, 3, 2)
    assert found.exclusive
    assert division(4, 2, 2).exclusive
    assert pairs(found.by_head("q", 12)) == [[(0, 8)], [(8, 12)]]
    assert pairs(found.by_head("k", 6, keys=True)) == [[(0, 4)], [(4, 6)]]
    # Queries, then keys, then values; or after each pair of queries their key and their value.
    assert pairs(found.fused("qkv", 24, stacked=True)) == [[(0, 8), (12, 16), (18, 22)], [(8, 12), (16, 18), (22, 24)]]
    assert pairs(found.fused("qkv", 24, stacked=False)) == [[(0, 16)], [(16, 24)]]
    for call, said in (
        (lambda: found.by_head("q", 13), "q: 13 features are not those of 6 query heads"),
        (lambda: found.by_head("k", 7, keys=True), "k: 7 features are not those of 3 key-value heads"),
        (lambda: found.fused("qkv", 18, stacked=True), "18 features are not those of 12 query, key and value heads"),
    ):
        with pytest.raises(LayoutError, match=said):
            call()


def test_ranks_that_share_a_key_have_it_beside_their_own_queries() -> None:
    found = division(4, 2, 4)
    assert not found.exclusive
    assert pairs(found.by_head("k", 4, keys=True)) == [[(0, 2)], [(0, 2)], [(2, 4)], [(2, 4)]]
    assert pairs(found.fused("qkv", 8, stacked=False)) == [
        [(0, 1), (2, 4)], [(1, 2), (2, 4)], [(4, 5), (6, 8)], [(5, 6), (6, 8)],
    ]  # fmt: skip
    for queries, keys in ((4, 3), (4, 0)):
        with pytest.raises(LayoutError, match=f"{keys} key-value heads do not divide {queries} query heads"):
            divide_heads(queries, keys, 2, "attention")


def attention(**attributes: Any) -> Any:
    module = nn.Module()
    vars(module).update(attributes)
    return module


@pytest.mark.parametrize(
    ("attributes", "heads"),
    [
        ({"num_heads": 6}, (6, 6)),
        ({"n_head": 6, "kv_heads": 2}, (6, 2)),
        ({"num_heads": 6, "num_key_value_groups": 3}, (6, 2)),
        ({"num_heads": 6, "num_key_value_groups": 3, "num_kv_heads": 3}, (6, 3)),
        ({"config": SimpleNamespace(num_attention_heads=4)}, (4, 4)),
        ({"config": {"num_heads": 4}}, (4, 4)),
        ({"num_heads": 2, "config": SimpleNamespace(num_attention_heads=4)}, (2, 2)),
        ({"num_heads": 0, "n_heads": 8}, (8, 8)),
    ],
)
def test_head_counts_are_read_from_the_module_or_its_configuration(attributes: dict[str, Any], heads: tuple[int, int]) -> None:
    found = division_of(attention(**attributes), "attention", 2)
    assert (found.queries, found.keys) == heads


def test_an_attention_says_how_many_heads_it_has() -> None:
    assert count_heads(attention(num_heads="4")) == 0
    with pytest.raises(LayoutError, match=r"layer\.0: it does not say how many heads it has"):
        division_of(attention(head_dim=4), "layer.0", 2)


@pytest.mark.parametrize(
    ("attributes", "stacked", "patches"),
    [
        (
            {"num_heads": 6, "num_key_value_heads": 3, "head_dim": 4, "embed_dim": 24, "num_key_value_groups": 2},
            False,
            {"num_heads": (4, 2), "num_key_value_heads": (2, 1), "embed_dim": (16, 8), "num_key_value_groups": (2, 2)},
        ),
        # What has another value than the count is something else.
        ({"num_heads": 6, "n_head": 5, "num_kv_heads": 4, "head_dim": 4, "inner_dim": 25}, False, {"num_heads": (4, 2)}),
        ({"num_heads": 6, "split_size": 24}, False, {"num_heads": (4, 2), "split_size": (16, 8)}),
        ({"config": SimpleNamespace(num_attention_heads=6)}, True, {"config.num_attention_heads": (4, 2)}),
        ({"config": SimpleNamespace(num_attention_heads=6)}, False, {}),
        ({"num_heads": 6, "config": SimpleNamespace(num_attention_heads=6)}, True, {"num_heads": (4, 2)}),
    ],
)
def test_attributes_that_count_heads_are_those_of_each_rank(
    attributes: dict[str, Any], stacked: bool, patches: dict[str, tuple[int, ...]]
) -> None:
    assert dict(division(6, 3, 2).patches(attention(**attributes), stacked=stacked)) == patches


@pytest.mark.parametrize(
    ("up", "down", "dims"),
    [
        ((4, 12, 8), (4, 8, 6), {"gate_up_proj": 1, "down_proj": 2}),
        ((4, 8, 12), (4, 6, 8), {"gate_up_proj": 2, "down_proj": 1}),
        ((4, 12, 8), (4, 6, 7), None),
        ((12, 8), (8, 6), None),
    ],
)
def test_experts_are_divided_along_what_lies_between_their_matrices(up: Any, down: Any, dims: Any) -> None:
    assert intermediate_dims({"gate_up_proj": up, "down_proj": down}) == dims
    assert intermediate_dims({"gate_up_proj": up, "down_proj": down, "router": (4, 4)}) is None


class FalconLinear(nn.Linear):
    pass


class Doubled(nn.Linear):
    pass


def test_layers_of_other_classes_are_not_taken_for_linear() -> None:
    assert [is_transposed(each) for each in (nn.Linear(2, 2), FalconLinear(2, 2))] == [False, False]
    assert [is_transposed(each) for each in (Doubled(2, 2), nn.Conv1d(2, 2, 1), nn.ReLU())] == [None] * 3
    assert "F.linear(input" in forward_source(nn.Linear(2, 2))
    assert forward_source(type("Made", (nn.Module,), {"forward": len})()) == ""


class Block(nn.Module):
    """Attention of two heads and an MLP; `fused` projects queries, keys and values in one layer."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.num_heads = 2  # type: ignore[assignment]
        names = ("qkv",) if fused else ("q_proj", "k_proj", "v_proj")
        for name in names:
            self.attention.add_module(name, nn.Linear(8, 24 if fused else 8))
        self.attention.out = nn.Linear(8, 8)
        self.mlp = nn.ModuleDict({"up": nn.Linear(8, 20), "down": nn.Linear(20, 8)})
        self.gated = nn.ModuleDict({"both": nn.Linear(8, 40), "back": nn.Linear(20, 8)})
        self.late = nn.ModuleDict({"only": nn.Linear(20, 8), "wide": nn.Linear(8, 20)})
        self.recurrent = nn.ModuleDict({"up": nn.Linear(8, 20), "down": nn.Linear(20, 8), "conv": nn.Conv1d(8, 8, 1)})
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("fused", [False, True])
def test_attention_and_mlps_are_known_by_their_shapes(fused: bool) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(Block(fused) for _ in range(2)), "head": nn.Linear(8, 20)})
    names = {"qkv": "qkv_stacked"} if fused else dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise")
    assert recognise_styles(model) == {
        f"blocks.{number}.{name}": style
        for number in range(2)
        for name, style in {
            **{f"attention.{name}": style for name, style in names.items()},
            "attention.out": "rowwise",
            "mlp.up": "colwise",
            "mlp.down": "rowwise",
            "gated.both": "packed_colwise",
            "gated.back": "rowwise",
        }.items()
    }


@pytest.mark.parametrize(
    ("kind", "plan", "by_shape"),
    [
        ("", {}, False),
        ("llama", {"layers.*.up": "colwise"}, False),
        ("llama", {"lm_head": "colwise"}, True),
        ("llama", None, True),
        ("phi3", {"layers.*.up": "colwise"}, True),
    ],
)
def test_a_type_without_rules_for_its_blocks_is_divided_by_shapes(kind: str, plan: Any, by_shape: bool) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=kind), tp_plan=plan)
    assert divides_by_shape(model) is by_shape


def interval(start: int, end: int) -> tuple[Interval, ...]:
    return (Interval(start=start, end=end),)


def test_a_rank_with_nothing_of_a_layer_is_named() -> None:
    layer = LayerPlan(module="a.b.up", style=Style.COLUMN, shares=(interval(0, 3), interval(3, 5)))
    assert (layer.parent, layer.sizes) == ("a.b", (3, 2))
    with pytest.raises(LayoutError, match=r"a\.up: too small to be divided among 2 ranks \(rank 1 has nothing\)"):
        LayerPlan(module="a.up", style=Style.COLUMN, shares=(interval(0, 3), interval(3, 3)))


def test_what_of_a_plan_is_in_blocks_in_experts_or_needs_the_whole_sequence() -> None:
    styles = {"a.0.moe.experts": Style.EXPERTS, "a.0.mlp.up": Style.COLUMN_GATHERED, "out.up": Style.COLUMN_GATHERED}
    plan = TensorPlan(
        size=2,
        layers=tuple(LayerPlan(module=name, style=style) for name, style in styles.items()),
        patches=(),
        attentions={"a.0.attention": division(4, 2, 2), "pool": division(4, 2, 2)},
        stacks=(("a.0", "a.1"),),
        notes=(),
    )
    assert [plan.in_block(each) for each in ("a.0.mlp", "a.1.x", "a.10.x", "a.0", "head")] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert [plan.in_experts(each) for each in ("a.0.moe.router", "a.0.moe", "a.0.mlp.up")] == [True, False, False]
    assert plan.whole_sequence_modules() == ("a.0.attention", "a.0.mlp")


def test_parts_of_packed_and_row_layers() -> None:
    model = nn.ModuleDict({"both": nn.Linear(4, 8), "back": nn.Linear(4, 6), "plain": nn.Linear(6, 4)})
    plan = plan_tensor(model, 2, {"both": "packed_colwise", "back": "rowwise", "plain": "colwise_rep"})
    parts = parts_of(model, plan, 1, sequence=False)
    assert parts["both.weight"].region.dims == ((Interval(start=2, end=4), Interval(start=6, end=8)), interval(0, 4))
    assert parts["back.weight"].region.dims == (interval(0, 6), interval(2, 4))
    assert "back.bias" not in parts
    assert parts["plain.bias"].region.dims == (interval(2, 4),)
    assert {layer.module: layer.style for layer in plan.layers}["plain"] is Style.COLUMN_GATHERED
    assert all((part.holders, part.partial) == ((1,), False) for part in parts.values())


def exchange(size: int) -> Any:
    return SimpleNamespace(size=size, index=0)


def test_a_sequence_is_shared_out_where_it_can_be_and_must_be() -> None:
    shares = SequenceShares(exchange(4))
    with torch.no_grad():
        assert shares.active
        assert [(shares.decide(length), shares.active) for length in (8, 6, 1, 4)] == [
            (True, True), (False, False), (False, False), (True, True),
        ]  # fmt: skip
        shares.decide(6)
    assert shares.active  # Gradients are recorded again.
    assert shares.decide(8)
    with pytest.raises(LayoutError, match="6 tokens cannot be shared out to 4 ranks; pad sequences to a multiple of 4"):
        shares.decide(6)
    assert [sequence_dim(torch.zeros(shape)) for shape in ((2, 3), (2, 3, 4))] == [0, 1]


def test_random_numbers_of_a_rank_are_its_own_and_leave_those_of_all_as_they_were() -> None:
    def drawn(rank: int) -> list[float]:
        seed_generators(7)
        randomness = ShardedRandomness(rank)
        found = [float(torch.rand(()))]
        for _ in range(2):
            with randomness.sharded():
                randomness.enter()
                assert randomness.entered
                found.append(float(torch.rand(())))
            assert not randomness.entered
            randomness.leave()
            found.append(float(torch.rand(())))
        return found

    first, second, again = drawn(0), drawn(1), drawn(0)
    assert first == again
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, False, True, False, True]
    assert len({*first, *second}) == 7
    seed_generators(7)
    assert first[2:] != [float(torch.rand(())) for _ in range(5)][2:]  # Each `enter` draws a number that all ranks share.


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_model_without_dropout_draws_nothing(dropout: float, sequence: bool) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        attention_dropout=dropout, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    Parallelized(model, TracedExchange(2), plan_tensor(model, 2), sequence=sequence)
    model.to_empty(device="cpu")
    before = torch.get_rng_state()
    model(torch.zeros(1, 4, dtype=torch.long))
    assert torch.equal(torch.get_rng_state(), before) is (dropout == 0)


def test_an_embedding_looks_up_its_own_tokens_alone() -> None:
    rows = torch.arange(1.0, 7.0).view(3, 2)
    asked: list[list[int]] = []

    def lookup(ids: torch.Tensor) -> torch.Tensor:
        asked.append(ids.tolist())
        return rows[ids]

    found = lookup_sharded_embedding(lookup, Interval(start=4, end=7), Exchange(), torch.tensor([3, 4, 6, 7]))
    assert asked == [[0, 0, 2, 0]]
    assert found.tolist() == [[0, 0], [1, 2], [5, 6], [0, 0]]


def test_rotary_outputs_of_a_latent_projection_follow_the_latent_ones() -> None:
    x = torch.arange(6.0).view(1, 6).requires_grad_()
    found = project_latent(lambda x: 2 * x, 4, Exchange(), x)
    assert torch.equal(found, 2 * x)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert gradient.tolist() == [[2.0] * 6]


def test_experts_take_arguments_by_position_and_by_name() -> None:
    x, scale = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    found = run_sharded_experts(lambda x, *, scale: x * scale, Exchange(), x, scale=scale)
    found.sum().backward()
    assert found.tolist() == [2.0] * 3
    assert x.grad is not None
    assert scale.grad is not None
    assert (x.grad.tolist(), scale.grad.tolist()) == ([2.0] * 3, [1.0] * 3)


class TestColumnsAndRowsAlone:
    """On a rank without others, layers compute what they replace."""

    def test_layers_that_share_an_input_give_its_gradient_and_their_own(self) -> None:
        torch.manual_seed(0)
        plain = [nn.Linear(4, 6), nn.Linear(4, 6)]
        source = SharedInput(Exchange())
        ours = [ColumnParallelLinear(nn.Linear(4, 6), source) for _ in plain]
        row = RowParallelLinear(last := nn.Linear(6, 4), Exchange(), source=source)
        for own, other in zip(ours, plain, strict=True):
            own.load_state_dict(other.state_dict())
        assert [(each.in_features, each.out_features) for each in (*ours, row)] == [(4, 6), (4, 6), (6, 4)]
        x = torch.randn(2, 3, 4)
        found, wanted = (
            ours[0](inner := x.clone().requires_grad_()) * ours[1](inner),
            plain[0](outer := x.clone().requires_grad_()) * plain[1](outer),
        )
        assert torch.allclose(row(found), last(wanted))
        row(found).sum().backward()
        last(wanted).sum().backward()
        assert inner.grad is not None
        assert outer.grad is not None
        assert torch.allclose(inner.grad, outer.grad, rtol=1e-5)
        for own, other in zip(ours, plain, strict=True):
            for one, two in zip(own.parameters(), other.parameters(), strict=True):
                assert one.grad is not None
                assert two.grad is not None
                assert torch.allclose(one.grad, two.grad, rtol=1e-4, atol=1e-6)

    def test_an_input_is_taken_once_by_all_its_layers_until_it_changes_or_is_forgotten(self) -> None:
        source = SharedInput(Exchange())
        layers = [ColumnParallelLinear(nn.Linear(4, 2), source) for _ in range(3)]
        assert source.members == layers
        x = torch.ones(1, 4, requires_grad=True) * 1
        first = source.take(x)
        assert source.take(x)[0] is first[0]
        x.add_(1)
        assert source.take(x)[0] is not first[0]
        source.forget()
        second = source.take(x)
        with torch.no_grad():
            assert source.take(x)[0] is not second[0]
        source.forget()
        third = source.take(x)[0]
        assert [source.take(x)[0] is third for _ in range(3)] == [True, True, False]  # Three layers read it.
        source.forget()
        narrow = source.narrow_for_shape(x, 2)
        assert (narrow.shape, source.take(narrow)[0].shape) == ((1, 2), (1, 4))
        source.forget()
        assert source.take(narrow)[0].shape == (1, 2)

    def test_a_column_layer_runs_backward_once(self) -> None:
        source = SharedInput(Exchange())
        layer, _ = (ColumnParallelLinear(nn.Linear(4, 2), source) for _ in range(2))
        x = torch.ones(1, 4, requires_grad=True)
        taken, out = source.take(x)[0], layer(x)
        torch.autograd.grad(out.sum(), taken, allow_unused=True, retain_graph=True)
        with pytest.raises(PhaseError, match="ran through a column layer twice"):
            torch.autograd.grad(out.sum(), taken, allow_unused=True)

    def test_some_outputs_of_a_whole_weight_are_computed(self) -> None:
        layer = nn.Linear(4, 6)
        rows = (Interval(start=1, end=3), Interval(start=5, end=6))
        sliced = ColumnParallelLinear(layer, SharedInput(Exchange()), rows=rows)
        x = torch.randn(2, 4)
        assert torch.allclose(sliced(x), layer(x)[:, [1, 2, 5]])

    def test_a_row_layer_refuses_inputs_that_are_divided_otherwise(self) -> None:
        with pytest.raises(ConfigError, match="has 6 of them here, and gets 4"):
            RowParallelLinear(nn.Linear(6, 4), Exchange())(torch.zeros(2, 4))

    def test_dropout_after_a_column_layer_is_this_ranks_until_the_row_layer(self) -> None:
        randomness = ShardedRandomness(0)
        column = ColumnParallelLinear(nn.Linear(4, 4), SharedInput(Exchange()), randomness=randomness)
        row = RowParallelLinear(nn.Linear(4, 4), Exchange(), randomness=randomness)
        x = torch.ones(1, 4)
        column.eval()(x)
        assert not randomness.entered
        out = column.train()(x)
        assert randomness.entered
        row(out)
        assert not randomness.entered
