"""Updates of flat shards, element by element, beside those of torch's own classes; averages; trials of unknown classes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from tests.support.state_groups import state_group
from zeromesh.comm.transport import BufferRequest, GatherBuffer
from zeromesh.errors import ConfigError, PhaseError
from zeromesh.flat.layout import ParameterSpec, build_layout
from zeromesh.intervals import Interval
from zeromesh.offload import Ledger, Purpose, SparePages, Tier, TierChoice, TieredTensor, Tiers
from zeromesh.optim.class_optimizer import ClassStates, WholeOptimizer, classify, make_optimizers, plain_group
from zeromesh.optim.fused_optimizer import BucketOptimizer, fused_update, moment_dtypes
from zeromesh.optim.optimizer_step import WeightAverage, clip_factor
from zeromesh.options import NO_GROUP, OptimizerClass, OptimizerSettings, ZeroOptions
from zeromesh.settings.keys import AverageSettings
from zeromesh.units.unit import Bucket

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "make", "settings"),
    [
        ("sgd", SGD, {"lr": 0.5, "weight_decay": 0.25}),
        ("sgd", SGD, {"lr": 0.5, "momentum": 0.5, "maximize": True}),
        ("sgd", SGD, {"lr": 0.5, "momentum": 0.5, "nesterov": True, "weight_decay": 0.25}),
        ("adagrad", Adagrad, {"lr": 0.5, "lr_decay": 0.5, "eps": 0.125, "weight_decay": 0.25}),
        ("adagrad", Adagrad, {"lr": 0.5, "maximize": True}),
        ("adam", Adam, {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.25}),
        ("adamw", AdamW, {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.25}),
        ("adamw", AdamW, {"lr": torch.tensor(0.5, dtype=torch.float64), "maximize": True}),
    ],
)
def test_an_update_has_all_settings_of_its_group(name: str, make: Any, settings: dict[str, Any]) -> None:
    random = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(5, generator=random, dtype=torch.float64) for _ in range(4))
    parameter = nn.Parameter(values.clone())
    optimizer = make([parameter], **settings)
    found = OptimizerSettings(name=name, momentum=settings.get("momentum", 0.0))  # type: ignore[arg-type]
    moments = [torch.zeros(5, dtype=torch.float64) for _ in moment_dtypes(found, torch.float64)]
    for step, gradient in enumerate(gradients):
        parameter.grad = gradient.clone()
        optimizer.step()
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        fused_update(name, group, values, gradient.clone(), moments, step)
        assert torch.allclose(values, parameter.detach(), rtol=1e-12)
    for key, moment in zip(moment_dtypes(found, torch.float64), moments, strict=True):
        assert torch.allclose(moment, optimizer.state[parameter][key], rtol=1e-12)


def test_momentum_does_not_begin_later() -> None:
    with pytest.raises(PhaseError, match="SGD has momentum now and had none when its states were made"):
        fused_update("sgd", {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.5}, *torch.ones(2, 3), (), 1)


def bucket_of(groups: list[int], trained: list[bool], sizes: tuple[int, ...] = (64, 64, 64)) -> Bucket:
    specs = [
        ParameterSpec(fqn=f"p{number}", shape=(size,), dtype=torch.float32, requires_grad=True, group=group)
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True))
    ]
    layout = build_layout("bucket", specs, 1)
    parameters = [nn.Parameter(torch.zeros(slot.spec.shape)) for slot in layout.slots]
    request = BufferRequest(name="bucket", padded=layout.padded, dtype=torch.float32, persistent=True)
    buffer = GatherBuffer(request, CPU, SparePages())
    whole = Interval(start=0, end=layout.padded)
    bucket = Bucket(layout, state_group(), parameters, buffer, whole, TieredTensor.of(torch.zeros(layout.padded)), None)
    for parameter, on in zip(parameters, trained, strict=True):
        parameter.requires_grad_(on)
    bucket.adopt_requires_grad()
    return bucket


def updated(optimizer: BucketOptimizer, start: int, length: int, groups: Any) -> list[float]:
    """What becomes of `length` zeros with gradients of 1: the changes, without equal neighbours."""
    master = torch.zeros(length)
    optimizer.step(start, [master, torch.ones(length)], groups)
    found = [float(each) for each in master]
    return [each for place, each in enumerate(found) if not place or each != found[place - 1]]


def test_a_part_of_a_shard_is_updated_by_its_groups() -> None:
    """Three parameters of 64 elements, sorted by group; what is in no group, frozen or without a gradient keeps its value."""
    groups = [{"lr": lr, "weight_decay": 0.0} for lr in (1.0, 2.0)]
    options = ZeroOptions(optimizer=OptimizerSettings(name="sgd"))
    tiers = Tiers(device=CPU, ledger=Ledger())
    bucket = bucket_of([0, 1, 1], [True] * 3)
    optimizer = BucketOptimizer(bucket, options, tiers)
    assert updated(optimizer, 0, 192, groups) == [-1.0, -2.0]
    assert updated(optimizer, 64, 64, groups) == [-2.0]
    assert updated(optimizer, 32, 96, groups) == [-1.0, -2.0]
    assert updated(optimizer, 0, 64, groups) == [-1.0]
    optimizer.begin()
    assert optimizer.steps == [1, 1, 1]
    bucket.missing = frozenset({1})
    optimizer.begin()
    assert optimizer.steps == [2, 1, 2]
    assert updated(optimizer, 0, 192, groups) == [-1.0, 0.0, -2.0]
    bucket.missing = frozenset()
    optimizer.begin()
    assert updated(optimizer, 0, 192, groups) == [-1.0, -2.0]
    assert optimizer.steps == [3, 2, 3]
    nobody = BucketOptimizer(bucket_of([NO_GROUP, 0, 1], [True, True, False]), options, tiers)
    assert updated(nobody, 0, 192, groups) == [0.0, -1.0, 0.0]
    nobody.begin()
    assert nobody.steps == [1, 1, 0]


def test_an_update_knows_how_many_came_before() -> None:
    """With equal gradients each update of Adam is as large as its rate."""
    options = ZeroOptions(optimizer=OptimizerSettings(name="adam"))
    optimizer = BucketOptimizer(bucket_of([0], [True], (64,)), options, Tiers(device=CPU, ledger=Ledger()))
    moments, master, group = (torch.zeros(2, 64), torch.zeros(64), {"weight_decay": 0.0, "betas": (0.5, 0.75), "eps": 0.0})
    for lr in (1.0, 2.0):
        optimizer.begin()
        optimizer.step(0, [master, torch.ones(64), *moments], [{**group, "lr": lr}])
    assert torch.allclose(master, torch.full((64,), -3.0))


def test_moments_rest_where_the_optimizer_does() -> None:
    tiers = Tiers(device=CPU, ledger=Ledger())
    optimizer = BucketOptimizer(bucket_of([0], [True], (64,)), ZeroOptions(), tiers)
    assert {name: each.numel for name, each in optimizer.moments.items()} == {"exp_avg": 64, "exp_avg_sq": 64}
    assert tiers.ledger.by_purpose(Tier.DEVICE) == {Purpose.MOMENTS: 2 * 64 * 4}
    assert list(optimizer.whole_states(0)) == []


@pytest.mark.parametrize(
    ("start", "every", "due"), [(0, 1, [1, 2, 3, 4, 5, 6]), (3, 1, [3, 4, 5, 6]), (0, 2, [2, 4, 6]), (3, 3, [3, 6])]
)
def test_averages_begin_and_recur_as_told(start: int, every: int, due: list[int]) -> None:
    settings = AverageSettings(decay=0.75, start_step=start, every_steps=every)
    averages = WeightAverage(settings, Tiers(device=CPU, ledger=Ledger()), TierChoice())
    assert [update for update in range(1, 7) if averages.is_due(update)] == due
    bucket = bucket_of([0], [True], (64,))
    bucket.master.write(0, torch.full((64,), 2.0)).wait()
    averages.allocate(bucket)
    assert bucket.average is not None
    assert bucket.average.load(CPU).tolist() == [2.0] * 64
    average, weights = torch.zeros(2), torch.full((2,), 4.0)
    averages.blend(average, weights)
    assert average.tolist() == [4.0, 4.0]  # The first one is taken as it is.
    averages.count = 1
    averages.blend(average, torch.zeros(2))
    assert average.tolist() == [3.0, 3.0]
    bucket.average.write(0, torch.full((64,), 5.0)).wait()
    averages.swap(bucket.master.load(CPU), bucket.average.load(CPU))
    assert (bucket.master.load(CPU).tolist(), bucket.average.load(CPU).tolist()) == ([5.0] * 64, [2.0] * 64)


def test_averages_are_swapped_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeromesh.optim.optimizer_step._SWAPPED_ELEMENTS", 48)
    averages = WeightAverage(AverageSettings(decay=0.5), Tiers(device=CPU, ledger=Ledger()), TierChoice())
    bucket = bucket_of([0, 0], [True] * 2, (64, 64))
    averages.allocate(bucket)
    assert bucket.average is not None
    bucket.master.write(0, torch.arange(128.0)).wait()
    averages.swap(bucket.master.load(CPU), bucket.average.load(CPU))
    assert bucket.average.load(CPU).tolist() == list(range(128))
    assert not bucket.master.load(CPU).any()


def test_no_limit_clips_nothing() -> None:
    assert [clip_factor(norm, 0.0) for norm in (0.0, 10.0)] == [1.0, 1.0]


class Kept(Optimizer):
    """A class that keeps of a parameter what it is told to."""

    def __init__(self, params: Any, state: Callable[[nn.Parameter], dict[str, Any]], **more: Any) -> None:
        super().__init__(params, {"lr": 0.5, **more})
        self.made = state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if not self.state[each]:
                    self.state[each].update(self.made(each))
                each.sub_(group["lr"] * each.grad)


def tried(optimizer: Optimizer) -> OptimizerClass:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return classify(optimizer, names={id(each): str(number) for number, each in enumerate(parameters)})


def kept(state: Callable[[nn.Parameter], dict[str, Any]], *shape: int) -> Optimizer:
    return Kept([nn.Parameter(torch.zeros(shape or (4, 3)))], state)


@pytest.mark.parametrize(
    ("state", "whole", "tensors", "scalars"),
    [
        (lambda _: {}, False, set(), set()),
        (lambda each: {"sum": torch.zeros_like(each), "step": 1}, False, {"sum"}, {"step"}),
        (lambda each: {"step": torch.tensor(1.0), "rate": 0.5, "none": None}, False, set(), {"step", "rate"}),
        (lambda each: {"rows": each.new_zeros(len(each))}, True, {"rows"}, set()),
        (lambda each: {"half": each.half(), "flag": True}, False, {"half"}, {"flag"}),
    ],
)
def test_a_trial_finds_states_and_whether_pieces_suffice(state: Any, whole: bool, tensors: set[str], scalars: set[str]) -> None:
    found = tried(kept(state))
    assert found.whole is whole
    (plan,) = found.plans.values()
    assert list(found.plans) == [(0, "0")]
    assert (set(plan.tensors), set(plan.scalars), plan.by_size) == (tensors, scalars, False)


@pytest.mark.parametrize(
    ("state", "shape", "said"),
    [
        (lambda each: {"model": torch.zeros_like(each)}, (), "has a state 'model', which is no name"),
        (lambda each: {"a.b": 1}, (), "has a state 'a.b', which is no name"),
        (lambda each: {"group_k": 1}, (), "has a state 'group_k', which is no name of its own"),
        (lambda each: {"list": [1]}, (), "keeps a list as 'list'"),
        (lambda each: {"made": SimpleNamespace(parts=[each])}, (), r"keeps a list as made\.parts"),
        (lambda each: {"complex": each.to(torch.complex128)}, (), "keeps torch.complex128 as 'complex'"),
        (lambda _: {}, (1,) * 6, "has a parameter of 6 dimensions; allowed are 5"),
    ],
)
def test_states_that_no_checkpoint_can_store_are_refused(state: Any, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tried(kept(state, *shape))


def test_an_object_among_the_states_is_kept_as_its_tensors_and_numbers() -> None:
    """As GaLore's projectors: flags and texts are the object's own, and the example has no memory."""

    def state(each: nn.Parameter) -> dict[str, Any]:
        made = SimpleNamespace(matrix=torch.zeros(len(each)), seen=0, rate=0.5, flag=True, kind="left", nothing=None)
        return {"made": made, "sum": torch.zeros_like(each)}

    found = tried(kept(state))
    (plan,) = found.plans.values()
    assert found.whole
    assert plan.by_size
    assert set(plan.tensors) == {"made.matrix", "sum"}
    assert plan.scalars == {"made.seen": 0, "made.rate": 0.5}
    assert "0x" not in repr(plan), "ranks compare their options as text"
    made = vars(plan.states["made"])
    assert made.pop("matrix").is_meta
    assert made == {"seen": 0, "rate": 0.5, "flag": True, "kind": "left", "nothing": None}


def test_a_trial_leaves_the_random_numbers_of_the_process_as_they_were() -> None:
    before = torch.get_rng_state()
    tried(kept(lambda each: {"drawn": float(torch.rand(()) * 0), "sum": torch.rand_like(each) * 0}))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_group_for_a_trial_is_a_copy_without_kernels_of_a_device() -> None:
    rate = torch.tensor(0.5)
    group = {"params": [1], "param_names": ["a"], "lr": rate, "foreach": True, "fused": True, "capturable": True, "eps": 0.25}
    found = plain_group(group)
    assert found == {"lr": rate, "foreach": False, "fused": False, "capturable": False, "eps": 0.25}
    assert found["lr"] is not rate
    assert "foreach" not in plain_group({"lr": 1.0})


def test_owners_of_whole_tensors_have_about_as_many_elements() -> None:
    """The largest come first; parameters in no group have no owner."""
    model = [nn.Parameter(torch.zeros(size, 1)) for size in (64, 192, 128, 64, 640)]
    own_class = tried(Kept([model[0]], lambda each: {"rows": each.new_zeros(len(each))}))
    options = ZeroOptions(optimizer=OptimizerSettings(own_class=own_class))
    buckets = [bucket_of([0, 0, 0], [True] * 3, (64, 192, 128)), bucket_of([0, NO_GROUP], [True] * 2, (64, 640))]
    shared = ClassStates(own_class, SimpleNamespace(size=2, index=0))  # type: ignore[arg-type]
    made = make_optimizers(buckets, options, Tiers(device=CPU, ledger=Ledger()), shared)
    assert shared.loads == [256, 192]
    owners = [each._owners for each in made if isinstance(each, WholeOptimizer)]
    names = [{bucket.layout.slots[n].spec.numel: owner for n, owner in each.items()} for bucket, each in zip(
        buckets, owners, strict=True)]  # fmt: skip
    assert names == [{192: 0, 128: 1, 64: 1}, {64: 0}]
