"""Whole tensors of a partitioned model on one rank: their names, what is stored, read, written and compared of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zeromesh.checkpoint.io.format import TensorSpec
from zeromesh.environment import read_environment
from zeromesh.errors import LayoutError, PhaseError, WeightsDifferError
from zeromesh.flat.layout import Region
from zeromesh.intervals import Interval
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import TieredTensor
from zeromesh.options import OptimizerSettings, Precision, ZeroOptions
from zeromesh.settings.keys import AverageSettings
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.full_state import _describe_part, persistent_buffers, require_storable, tensors_by_stage


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.words.weight
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("kept", torch.ones(2))
        self.norm.register_buffer("again", self.kept)


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def engine_of(model: nn.Module, **changes: Any) -> ZeroEngine:
    mesh = Mesh(MeshShape(), read_environment({}), device=torch.device("cpu"), timeout_seconds=5)
    options = ZeroOptions(optimizer=OptimizerSettings(name="sgd", momentum=0.5), **changes)
    return ZeroEngine.build(model, mesh, options)


NAMES = ["frozen", "norm.bias", "norm.weight", "words.weight"]
BUFFERS = ["kept", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]


def test_names_and_sizes_count_a_tied_parameter_once(model: Tied) -> None:
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    state = engine_of(model).state
    assert (sorted(state.names()), state.numel) == (NAMES, 3 + 4 + 4 + 24)
    assert state.nbytes_of(["words.weight", "head.weight", "norm.bias"]) == 4 * (24 + 4)
    assert [name for name, _ in state.parameters(["norm.bias", "head.weight"])] == ["norm.bias"]
    for name in (*NAMES, "head.weight"):
        value = state.parameter(name)
        assert torch.equal(value, before["words.weight" if name == "head.weight" else name])
        value.zero_()
    assert torch.equal(state.parameter("words.weight"), before["words.weight"])
    assert [sorted(each) for each in zip(*((s.name, n) for s, (n, _) in zip(
        state.stored_specs(), state.stored(), strict=True)), strict=True)] == [sorted([*NAMES, *BUFFERS])] * 2  # fmt: skip
    assert sorted(name for name, _ in state.buffers()) == BUFFERS
    for call in (state.parameter, state.gradient, lambda name: state.nbytes_of([name])):
        with pytest.raises(LayoutError, match="the model has no parameter 'passing'"):
            call("passing")
    assert state.gradient("frozen") is None


def test_a_gathered_parameter_is_a_copy_to_read(model: Tied) -> None:
    engine = engine_of(model)
    before = engine.state.parameter("words.weight")
    with engine.gathered(["head.weight"]):
        assert torch.equal(model.head.weight, before)
        assert model.head.weight is model.words.weight
    for write in (lambda: model.head.weight.data.add_(1), lambda: model.words.weight.add_(1)):
        with (
            torch.no_grad(),
            pytest.raises(PhaseError, match=r"words\.weight: written inside gathered\(\)"),
            engine.gathered(["words.weight", "norm.bias"]),
        ):
            write()
    assert torch.equal(engine.state.parameter("words.weight"), before)
    with torch.no_grad():
        assert torch.equal(model.words(torch.arange(6)), before)


def test_values_that_a_model_is_given_are_received_under_their_names(model: Tied) -> None:
    engine = engine_of(model)
    kept = model.norm.weight
    with engine.state.receiving_values() as given:
        assert all(each.is_meta for each in model.parameters())
        with torch.no_grad():
            model.head.weight.copy_(torch.full((1, 4), 2.0))
            model.norm.bias = nn.Parameter(torch.ones(4))
    assert {name: value.tolist() for name, value in given.items()} == {
        "words.weight": [[2.0] * 4] * 6, "norm.bias": [1.0] * 4,
    }  # fmt: skip
    assert model.norm.weight is kept
    with engine.loading():
        engine.checkpoint_state.fill(given)
    assert engine.state.parameter("words.weight").tolist() == [[2.0] * 4] * 6
    assert engine.state.parameter("frozen").tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_what_a_checkpoint_has_of_each_parameter(model: Tied, compute: torch.dtype) -> None:
    """Masters where they differ, states of what was trained alone; a load needs no parameters that have masters."""
    engine = engine_of(model, precision=Precision(compute=compute), average=AverageSettings(decay=0.5))
    state = engine.checkpoint_state
    narrow = compute == torch.bfloat16
    kinds: dict[str, set[str]] = {}
    for spec in state.tensors():
        kinds.setdefault(spec.name, set()).add(spec.kind)
    # Batch norms stay in fp32.
    states = {"momentum_buffer", "ema", "model"}
    assert kinds == {
        **{name: {"model"} for name in BUFFERS},
        "frozen": {"model"},
        "words.weight": states | {"master"} if narrow else states,
        "norm.weight": states,
        "norm.bias": states,
    }
    assert {each.kind for each in state.tensors(reading=True) if each.name == "words.weight"} == {
        "master", "ema", "momentum_buffer",
    }  # fmt: skip
    assert state.aliases() == {"head.weight": "words.weight"}
    assert state.frozen() == {"frozen"}
    written = {(each.spec.kind, each.spec.name): each for each in state.shards_to_write()}
    assert set(written) == {(each.kind, each.name) for each in state.tensors()}
    assert (written["model", "words.weight"].spec.dtype, written["ema", "words.weight"].spec.dtype) == (
        compute, torch.float32,
    )  # fmt: skip
    buffer = written["model", "kept"].values.load(torch.device("cpu"))
    model.kept.add_(1)  # type: ignore[operator]
    assert buffer.tolist() == [1.0, 1.0]
    read = {each.spec.name: each for each in state.shards_to_read()}
    read["kept"].values.write(0, torch.zeros(2)).wait()
    assert model.kept.tolist() == [0.0, 0.0]  # type: ignore[operator]
    assert state.update_order() == {}


def test_buffers_that_share_memory_still_do_when_they_are_read(model: Tied) -> None:
    """Loading writes into a buffer's own memory, so a view of it, persistent too, goes on showing what forward writes to it."""
    square = torch.arange(6.0).view(2, 3)
    for name, buffer in {"square": square, "turned": square.t(), "column": square[:, 1]}.items():
        model.register_buffer(name, buffer)
    engine = engine_of(model)
    shards = {each.spec.name: each.values for each in engine.checkpoint_state.shards_to_write()}
    square.zero_()
    for each in engine.checkpoint_state.shards_to_read():
        each.values.copy_from(shards[each.spec.name])
    assert square.tolist() == [[0, 1, 2], [3, 4, 5]]
    square.add_(1)
    assert model.turned.tolist() == [[1, 4], [2, 5], [3, 6]]  # type: ignore[operator]
    assert model.column.tolist() == [2, 5]  # type: ignore[operator]


def test_ranks_with_other_weights_are_named_by_the_majority(model: Tied, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    state = engine.checkpoint_state
    rows: list[dict[str, str]] = []
    world: Any = SimpleNamespace(ranks=range(3), gather_json=lambda mine, what: rows)
    monkeypatch.setattr(state._mesh, "world", world)
    rows[:] = [{"a": "1", "b": "2"}, {"a": "1"}, {"a": "1", "b": "2"}]
    state.require_same_weights()
    for values, said in (
        (({"a": "1"}, {"a": "2"}, {"a": "1"}), "a: rank 1 has other values than ranks 0, 2"),
        (({"a": "1"}, {"a": "2"}, {}), "a: rank 0 has 1, rank 1 has 2"),
    ):
        rows[:] = values
        with pytest.raises(WeightsDifferError, match=said):
            state.require_same_weights()
    rows[:] = [*({f"w{number}": str(rank) for number in range(10)} for rank in range(2)), {}]
    with pytest.raises(WeightsDifferError) as raised:
        state.require_same_weights()
    assert str(raised.value).splitlines()[-2:] == ["w7: rank 0 has 0, rank 1 has 1", "and 2 more"]


def test_digests_are_those_of_all_that_a_rank_holds(model: Tied) -> None:
    state = engine_of(model).checkpoint_state
    digests = state._digests()
    assert {"words.weight", "words.weight (master), at rest", "frozen", "frozen, at rest", "kept, at rest"} <= set(digests)
    assert "words.weight (momentum_buffer), at rest" in digests
    with torch.no_grad():
        model.kept[1] += 1  # type: ignore[index]
    assert {name for name, value in state._digests().items() if digests[name] != value} == {"kept, at rest"}


def test_a_part_is_told_by_its_boxes_and_elements() -> None:
    columns = Region(shape=(4, 6), dims=((Interval(start=0, end=4),), (Interval(start=0, end=1), Interval(start=3, end=5))))
    whole = Region.whole((4, 6))

    def told(region: Region, start: int, end: int) -> str:
        return _describe_part(region, Interval(start=start, end=end))

    assert [told(whole, 0, 24), told(whole, 3, 24)] == ["", " elements 3:24"]
    assert [told(columns, 0, 12), told(columns, 0, 3)] == ["[0:4 x 0:1+3:5]", "[0:4 x 0:1+3:5] elements 0:3"]


def test_tensors_of_several_stages_are_those_of_the_first() -> None:
    def tensor(kind: str, name: str, dtype: torch.dtype = torch.float32) -> TensorSpec:
        return TensorSpec(kind=kind, name=name, dtype=dtype, shape=(2, 3))

    other = [["model", "a", "float32", [2, 3]], ["ema", "a", "float32", [2, 3]], ["model", "b", "bfloat16", [2, 3]]]
    pipeline: Any = SimpleNamespace(gather_json=lambda rows, what: [rows, other, other])
    assert tensors_by_stage([tensor("model", "a")], pipeline, "tensors") == [
        [tensor("model", "a")], [tensor("ema", "a"), tensor("model", "b", torch.bfloat16)], [],
    ]  # fmt: skip


def test_buffers_are_listed_once_without_those_that_do_not_persist(model: Tied) -> None:
    found = persistent_buffers(model)
    assert sorted(found) == BUFFERS
    assert found["kept"] is model.kept
    model.norm.running_mean = torch.zeros(8)[::2]
    shards = {each.spec.name: each for each in engine_of(model).checkpoint_state.shards_to_read()}
    shards["norm.running_mean"].values.write(0, torch.arange(4.0)).wait()
    assert model.norm.running_mean.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert isinstance(shards["norm.running_mean"].values, TieredTensor)


class Counter(nn.Module):
    def get_extra_state(self) -> Any:
        return 1


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (torch.ones(2, dtype=torch.complex128), "inner.table is a tensor of torch.complex128 and torch.strided"),
        (torch.eye(2).to_sparse(), "inner.table is a tensor of torch.float32 and torch.sparse_coo"),
        (nn.Parameter(torch.ones(2, dtype=torch.complex128), requires_grad=False), "inner.table is a tensor"),
        (Counter(), r"inner.table._extra_state of a Counter \(get_extra_state\) is no tensor of the model"),
    ],
)
def test_what_no_checkpoint_holds_is_refused_unless_it_is_left_out(model: Tied, made: Any, words: str) -> None:
    require_storable(model, "leave it out")
    model.inner = nn.Module()
    if type(made) is torch.Tensor:
        model.inner.register_buffer("table", made)
    else:
        model.inner.table = made
    with pytest.raises(LayoutError, match=f"{words}.*, or leave it out"):
        require_storable(model, "leave it out")
    require_storable(model, "leave it out", ["inner.table", "inner.table._extra_state"])
