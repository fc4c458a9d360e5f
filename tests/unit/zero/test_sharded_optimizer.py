"""The optimizer of a user's own loop on a single rank: what its calls give, in which order they are allowed, and its settings."""

import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial, wraps
from itertools import count
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.optimization import Adafactor, AdafactorSchedule

from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError, PhaseError
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.options import Precision, ZeroOptions
from zeromesh.settings.keys import ScalerSettings
from zeromesh.zero.autograd_engine import AutogradEngine
from zeromesh.zero.sharded_optimizer import ChainedOptimizer, ShardedOptimizer, settings_of

HALF = Precision(compute=torch.float16, loss_scale=ScalerSettings(initial_scale=8.0))
GROWING = Precision(compute=torch.float16, loss_scale=ScalerSettings(initial_scale=8.0, growth_interval=1))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))


class Rated(Optimizer):
    """A class that reads a rate of its own, and a factor that is set on parameters."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.rate = 1.0
        self.kept: Any = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad * group["lr"] * self.rate * getattr(each, "factor", 1.0))


class Loop:
    """A partitioned net with its optimizer; `plain` is the optimizer that this one has replaced."""

    def __init__(self, precision: Precision | None = None, factor: float = 1.0, accumulation: int = 1, make: Any = SGD) -> None:
        self.model = net()
        self.plain: Any = make(self.model.parameters(), lr=1.0)
        settings = settings_of(self.plain, self.model.named_parameters())
        options = ZeroOptions(precision=precision or Precision(), optimizer=settings, accumulation=accumulation)
        mesh = Mesh(MeshShape(), read_environment({}), device=torch.device("cpu"), timeout_seconds=5)
        self.engine = AutogradEngine.build(self.model, mesh, options)
        self.optimizer = ShardedOptimizer(self.plain, self.engine, factor)

    def loss(self, size: float = 1.0) -> torch.Tensor:
        x: torch.Tensor = self.model(torch.full((2, 8), size, dtype=self.engine.options.precision.compute))
        return x.float().sum()

    def weights(self) -> torch.Tensor:
        return torch.cat([value.reshape(-1) for _, value in self.engine.state.parameters()])


def test_a_scaled_loss_counts_for_one_step_alone() -> None:
    loop = Loop(HALF)
    optimizer = loop.optimizer
    calls: list[Callable[[], object]] = [
        optimizer.step,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.gradient("0.weight"),
    ]
    for _ in range(2):
        loop.loss().backward()
        for call in calls:
            with pytest.raises(PhaseError, match="float16 gradients need the loss scale"):
                call()
        optimizer.zero_grad()
        optimizer.scale(loop.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = Loop()
    loss = plain.loss()
    assert plain.optimizer.scale(loss) is loss
    loss.backward()
    plain.optimizer.step()


@pytest.mark.parametrize(("limit", "times"), [(0.0, 1.0), (1.0, float("nan")), (1.0, float("inf")), (-1.0, 1.0)])
def test_clipping_is_that_of_torch(limit: float, times: float) -> None:
    """Of gradients of which one is no number too, and to nothing."""
    loop, plain = Loop(), net()
    optimizer = SGD(plain.parameters(), lr=1.0)
    for model, clip in ((loop.model, loop.optimizer), (plain, None)):
        model(torch.ones(2, 8)).sum(0).mul(torch.tensor([times, 1.0, 1.0, 1.0])).sum().backward()
        if clip is None:
            nn.utils.clip_grad_norm_(plain.parameters(), limit)
        else:
            clip.clip_grad_norm_(limit)
    optimizer.step()
    loop.optimizer.step()
    assert torch.allclose(loop.weights(), torch.cat([each.reshape(-1) for each in plain.parameters()]), equal_nan=True)


def test_what_overflows_is_skipped_and_halves_the_scale() -> None:
    loop = Loop(HALF)
    before = loop.weights()
    for size, scale, skipped in ((6e4, 8.0, True), (1.0, 4.0, False), (6e4, 4.0, True)):
        loss = loop.loss(1.0) * size
        assert torch.equal(loop.optimizer.scale(loss), scale * loss)
        loop.optimizer.scale(loss).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        assert loop.optimizer.skipped == skipped
        after = loop.weights()
        assert torch.equal(before, after) == skipped
        before = after
    assert loop.engine.loss_scale == 2.0


@pytest.mark.parametrize("precision", [GROWING, Precision()])
def test_norms_and_gradients_have_the_factor_and_no_scale(precision: Precision) -> None:
    reference = net()
    reference(torch.ones(2, 8)).sum().backward()
    loop = Loop(precision, factor=0.5)
    loop.optimizer.scale(loop.loss()).backward()

    def gradient() -> Any:
        return loop.optimizer.gradient("1.weight")

    wanted: Any = reference[1].weight.grad
    norm = 0.5 * float(nn.utils.get_total_norm([each.grad for each in reference.parameters() if each.grad is not None]))
    assert torch.allclose(gradient(), 0.5 * wanted, rtol=1e-2)
    assert float(loop.optimizer.clip_grad_norm_(2 * norm)) == pytest.approx(norm, rel=1e-2)
    assert torch.allclose(gradient(), 0.5 * wanted, rtol=1e-2)
    assert float(loop.optimizer.clip_grad_norm_(norm / 4)) == pytest.approx(norm, rel=1e-2)
    assert float(loop.optimizer.clip_grad_norm_(norm / 16)) == pytest.approx(norm / 4, rel=1e-2)
    assert torch.allclose(gradient(), 0.5 * wanted / 16, rtol=1e-2)
    before = loop.weights()
    loop.optimizer.step()
    assert float((loop.weights() - before).norm()) == pytest.approx(norm / 16, rel=2e-2)


def test_after_clipping_no_backward_is_added_until_gradients_are_forgotten() -> None:
    loop = Loop()
    loop.loss().backward()
    loop.optimizer.clip_grad_norm_(1e-3)
    with pytest.raises(PhaseError, match="the gradients of this step have been clipped"):
        loop.loss().backward()
    loop.optimizer.zero_grad()
    loop.loss().backward()
    assert float(loop.optimizer.clip_grad_norm_(1.0)) > 1.0
    loop.optimizer.zero_grad()
    with pytest.raises(PhaseError, match="no gradients"):
        loop.optimizer.clip_grad_norm_(1.0)
    norms = []
    for _ in range(2):
        loop.loss().backward()
        norms.append(loop.engine.gradient_norm(1.0))
    assert norms[1] == pytest.approx(2 * norms[0])
    loop.optimizer.step()
    for call in (loop.optimizer.step, lambda: loop.optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(PhaseError, match="has used the gradients up"):
            call()


def test_a_compiled_function_may_clip_and_step() -> None:
    loop, plain = Loop(), net()
    optimizer = SGD(plain.parameters(), lr=1.0)

    @torch.compile(backend="eager")
    def finish(optimizer: Any, clip: Callable[[float], object]) -> None:
        clip(0.5)
        optimizer.step()
        optimizer.zero_grad()

    loop.loss().backward()
    plain(torch.ones(2, 8)).sum().backward()
    finish(loop.optimizer, loop.optimizer.clip_grad_norm_)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    assert torch.allclose(loop.weights(), torch.cat([each.reshape(-1) for each in plain.parameters()]))


def test_all_ranks_update_outside_of_no_sync() -> None:
    loop = Loop()
    with ExitStack() as outer:
        outer.enter_context(loop.optimizer.no_sync())
        with pytest.raises(ZeroDivisionError), loop.optimizer.no_sync():
            raise ZeroDivisionError
        loop.loss().backward()
        with pytest.raises(PhaseError, match=r"leave no_sync\(\)"):
            loop.optimizer.step()
    loop.loss().backward()
    gradient = loop.optimizer.gradient("1.bias")
    assert gradient is not None
    assert gradient.tolist() == [4.0] * 4  # Two samples, twice.
    loop.optimizer.step()


def test_the_replaced_optimizer_does_not_step_and_its_schedulers_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    loop = Loop()
    scheduler = torch.optim.lr_scheduler.StepLR(loop.plain, 1, 0.5)
    with pytest.raises(PhaseError, match=r"call step\(\) of the optimizer that shard\(\) has returned"):
        loop.plain.step()
    with pytest.raises(PhaseError, match="states are divided among ranks"):
        loop.optimizer.load_state_dict({})
    loop.loss().backward()
    loop.optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in loop.optimizer.param_groups] == [0.5]
    assert not [each for each in recwarn if "lr_scheduler" in str(each.message)]
    assert [loop.optimizer.stands_for(each) for each in (loop.optimizer, loop.plain, None, Loop().plain)] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: optimizer.state.clear(),
        lambda optimizer: optimizer.state.pop(optimizer.param_groups[0]["params"][0], None),
        lambda optimizer: optimizer.state.setdefault(optimizer.param_groups[0]["params"][0], {}),
        lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
        lambda optimizer: optimizer.param_groups[0].update(params=[]),
        lambda optimizer: optimizer.param_groups[0]["params"].reverse(),
        lambda optimizer: optimizer.param_groups.pop(),
        lambda optimizer: setattr(optimizer, "param_groups", []),
        lambda optimizer: optimizer.param_groups[0].update(decoupled_weight_decay=True),
    ],
)
def test_what_shard_has_fixed_is_not_changed_without_a_word(change: Callable[[Optimizer], object]) -> None:
    def changed() -> None:
        change(loop.optimizer)
        loop.optimizer.step()

    loop = Loop()
    loop.loss().backward()
    loop.optimizer.param_groups[0]["lr"] = 0.5
    loop.optimizer.step()
    with pytest.raises(PhaseError, match=r"states.* unshard\(\) and shard\(\)"):
        changed()


def test_attributes_of_the_optimizer_and_of_parameters_count_as_they_are_at_an_update() -> None:
    def moved() -> list[float]:
        before = loop.weights()
        loop.loss().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return [round(float(each), 3) for each in (before - loop.weights())[-10:]]  # The weights' end, and the biases.

    loop = Loop(make=Rated)
    bias, first = loop.model[1].bias, moved()
    assert first[-4:] == [2.0] * 4
    bias.factor = 0.5
    assert moved()[-4:] == [1.0] * 4
    loop.plain.rate = 0.25
    assert moved()[-4:] == [0.25] * 4
    del bias.factor
    assert moved()[-4:] == [0.5] * 4
    torch.optim.lr_scheduler.ConstantLR(loop.optimizer, 1.0)
    loop.optimizer.note = "what the class has not"
    moved()
    loop.optimizer.rate = 1.0
    with pytest.raises(PhaseError, match=r"rate was set here, but is read from the optimizer given to shard\(\)"):
        moved()


class Twisted(Rated):
    """A class that keeps a state of parameters with a factor alone."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None and hasattr(each, "factor"):
                    before = self.state[each].setdefault("before", torch.zeros_like(each))
                    each.grad.add_(before.lerp_(each.grad, 0.5))
        super().step()


class Writing(Rated):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for each in group["params"]:
                each.before = getattr(each, "before", 0.0) + 1.0


class Naming(Rated):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        # pytest replaces an `assert` by one that knows its session, in whose objects parameters would be looked for.
        if not all("bias" in name for group in self.param_groups for name in group["param_names"]):
            raise AssertionError


class Scaling(Rated):
    """A class whose groups list names under a key of its own."""

    def __init__(self, params: Any) -> None:
        named = [(str(number), each) for number, each in enumerate(params)]
        names, parameters = zip(*named, strict=True)
        super().__init__([{"params": parameters, "names": list(names)}])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for name, each in zip(group["names"], group["params"], strict=False):
                each.sub_(each.grad * (0.5 if name == "3" else 1.0))


class Counting(Rated):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.rate *= 0.5


@pytest.mark.parametrize(
    ("kept", "where"),
    [
        (lambda model: dict.fromkeys(model.parameters(), 1.0), "kept"),
        (lambda model: {name: [each] for name, each in model.named_parameters()}, "kept"),
        (lambda model: {"rates": ({id(each) for each in model.parameters()},)}, "kept"),
        (lambda model: model, "kept"),
        (lambda model: SGD(model.parameters(), lr=1.0), "kept"),
        (weakref.ref, "kept"),
        (weakref.proxy, "kept"),
        (lambda model: WeakTensorKeyDictionary(dict.fromkeys(model.parameters(), 1.0)), "kept"),
        (lambda model: {1: "one", 2: torch.ones(3), 3: [None, nn.Linear(2, 2)]}, None),
    ],
)
def test_an_optimizer_that_knows_its_parameters_is_refused(kept: Callable[[Any], Any], where: str | None) -> None:
    model = net()
    optimizer = Rated(model.parameters())
    optimizer.kept = kept(model)
    if where is None:
        assert settings_of(optimizer, model.named_parameters()).own_class is not None
        return
    for each in (optimizer, ChainedOptimizer(optimizer)):
        with pytest.raises(ConfigError, match=f"has parameters, or their id\\(\\), in {where}, and its update gets pieces"):
            settings_of(each, model.named_parameters())
    optimizer.kept = {}
    optimizer.param_groups[0]["anchors"] = kept(model)
    with pytest.raises(ConfigError, match=r"or their id\(\), in anchors"):
        settings_of(optimizer, model.named_parameters())


def test_the_schedule_of_adafactor_may_ask_for_a_gradient() -> None:
    make = partial(Adafactor, relative_step=True, warmup_init=True, lr=None)
    loop = Loop(make=lambda parameters, lr: make(parameters))
    schedule = AdafactorSchedule(loop.plain, initial_lr=0.25)
    loop.loss().backward()
    loop.optimizer.step()
    schedule.step()
    assert loop.optimizer.param_groups[0]["lr"] == 0.25
    with pytest.raises(PhaseError, match="the gradient of a parameter was read"):
        _ = loop.model[0].weight.grad


TABLE: dict[Any, float] = {}


def look_up(parameter: Any) -> float:
    return next(TABLE.get(each, 1.0) for each in [parameter])


def by_closure(table: Any) -> type[Rated]:
    class Looking(Rated):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.rate = next(table.get(each, 1.0) for group in self.param_groups for each in group["params"])
            super().step()

    return Looking


def by_object(table: Any) -> type[Rated]:
    return by_closure(SimpleNamespace(get=partial(SimpleNamespace(table=deque([table])).table[0].get)))


def by_global(table: Any) -> type[Rated]:
    TABLE.update(table)

    class Looking(Rated):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            look_up(self.param_groups[0]["params"][0])
            super().step()

    return Looking


class Registry:
    table: ClassVar[dict[Any, float]] = TABLE


def by_another_class(table: Any) -> type[Rated]:
    class Looking(Rated):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            Registry.table.get(self.param_groups[0]["params"][0])
            super().step()

    TABLE.update(table)
    return Looking


def by_module(table: Any) -> type[Rated]:
    class Looking(Rated):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            import settings_of_loop as settings

            settings.inner.table.get(self.param_groups[0]["params"][0])
            super().step()

    sys.modules["settings_of_loop"] = module = ModuleType("settings_of_loop")
    vars(module)["inner"] = inner = ModuleType("settings_of_loop.inner")
    vars(inner).update(table=TABLE, inner=module)
    TABLE.update(table)
    return Looking


def by_class(table: Any) -> type[Rated]:
    return type("Looking", (type("Base", (Rated,), {"table": {id(each): 0.5 for each in table}}),), {})


@pytest.mark.parametrize(
    ("make", "where"),
    [(by_class, "table"), *((make, "step") for make in (by_closure, by_object, by_global, by_another_class, by_module))],
)
def test_a_class_that_knows_parameters_is_refused(make: Callable[[Any], Any], where: str) -> None:
    model = net()
    try:
        known, other = (make(dict.fromkeys(model.parameters(), 0.5)), make({"none": 1.0, nn.Parameter(torch.ones(2)): 0.5}))
        with pytest.raises(ConfigError, match=rf"optimizer Looking has parameters, or their id\(\), in {where}"):
            settings_of(known(model.parameters()), model.named_parameters())
    finally:
        TABLE.clear()
    assert settings_of(other(model.parameters()), model.named_parameters()).own_class is not None
    sys.modules.pop("settings_of_loop", None)


class ByNumber(Rated):
    """A class that knows groups by their number, as AdaBound does, and the last of them."""

    def __init__(self, params: Any, rates: Any = (1.0, 0.5), last: bool = False) -> None:
        super().__init__(params)
        self.rates, self.last = rates, last

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for rate, group in zip(self.rates, self.param_groups[: -1 if self.last else None], strict=False):
            for each in group["params"]:
                state = self.state[each]
                state["step"] = state.get("step", 0) + 1
                each.sub_(each.grad * rate / state["step"])


def test_groups_that_are_told_by_their_number_are_refused() -> None:
    model, said = net(), "its update of one parameter depends on others, on groups beside its own"
    for make in (ByNumber, OfFilledGroups, partial(ByNumber, rates=(1.0, 1.0), last=True)):
        with pytest.raises(ConfigError, match=f"optimizer (ByNumber|OfFilledGroups): {said}"):
            settings_of(two_groups(make, {}, model), model.named_parameters())
        single = [make(model[n].parameters()) for n in range(2)] if make is not partial else [ByNumber(model.parameters())]
        assert settings_of(ChainedOptimizer(*single), model.named_parameters()).own_class is not None
    equal = two_groups(partial(ByNumber, rates=(0.5, 0.5)), {}, model)
    assert settings_of(equal, model.named_parameters()).own_class is not None


class OfFilledGroups(ByNumber):
    """The same of a class that looks into each group, and passes parameters without a gradient over."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(group["params"][0] is None for group in self.param_groups):
            raise AssertionError
        for rate, group in zip(self.rates, self.param_groups, strict=False):
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad * rate)


class ByPlace(Rated):
    """A class that has a rate for each parameter, by its place among all of them or in its group."""

    rate_of: Any = None
    first = False  # if values are those of the first group

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        numbers = count()
        for group in self.param_groups:
            for place, each in enumerate(group["params"]):
                each.sub_(each.grad * self.rate_of(self, self.param_groups[0] if self.first else group, place, next(numbers), each))


@pytest.mark.parametrize("rates", [(1.0,) * 4, (0.5, 1, 1, 1), (1, 1, 0.5, 1), (1, 1, 1, 0.5)])
@pytest.mark.parametrize("kept", [tuple, list, torch.tensor])
def test_rates_by_the_place_of_parameters_are_refused(rates: tuple[float, ...], kept: Callable[[Any], Any]) -> None:
    model = net()
    in_group, own, second = ByPlace(model.parameters()), ByPlace(model.parameters()), two_groups(ByPlace, {}, model)
    in_group.param_groups[0]["rates"] = own.rates = second.rates = kept(rates)
    in_group.rate_of = lambda _, group, place, *__: group["rates"][place]
    own.rate_of = second.rate_of = lambda own, _g, _p, number, _: own.rates[number]
    for each in (in_group, own, second):
        if len({*rates}) > 1:
            with pytest.raises(ConfigError, match="optimizer ByPlace: its update of one parameter depends on others"):
                settings_of(each, model.named_parameters())
        else:
            assert settings_of(each, model.named_parameters()).own_class is not None


def test_a_value_of_another_group_is_not_taken() -> None:
    model = net()
    optimizer: Any = two_groups(ByPlace, {}, model)
    optimizer.rate_of = lambda _, group, *__: group["lr"]
    assert settings_of(optimizer, model.named_parameters()).own_class is not None
    optimizer.first = True
    with pytest.raises(ConfigError, match="depends on others, on groups beside its own"):
        settings_of(optimizer, model.named_parameters())


@pytest.mark.parametrize(
    ("rate_of", "whole"),
    [
        (lambda _, group, _p, _n, each: group["lr"] if each.shape[0] == 8 else 0.5, True),
        (lambda _, group, _p, _n, each: 1.0 + group["decay"] * (each.ndim > 1), True),
        (lambda _, group, _p, _n, each: 0.5 if each.grad.numel() > 10_000 else 1.0, True),
        (lambda _, group, _p, _n, each: torch.ones(each.size()), True),
        (lambda _, group, _p, _n, each: torch.ones_like(each) + each.abs().mul(group["lr"]), False),
    ],
)
def test_what_asks_for_sizes_is_updated_whole(rate_of: Any, whole: bool) -> None:
    model = net()
    optimizer = ByPlace(model.parameters())
    optimizer.rate_of, optimizer.param_groups[0]["decay"] = rate_of, 0.0
    found = settings_of(optimizer, model.named_parameters()).own_class
    assert found is not None
    assert found.whole == whole
    assert {plan.by_size for plan in found.plans.values()} == {whole}


class ByName(Rated):
    """A class that keeps states under names, as LoRA-FA does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["global"]["steps"] = self.state["global"].get("steps", 0) + 1  # type: ignore[index]
        super().step()


def test_settings_that_bitsandbytes_overrides_are_those_of_pieces() -> None:
    """transformers' Trainer keeps the states of embeddings in 32 bits so."""
    optim = pytest.importorskip("bitsandbytes.optim")
    model = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 64, bias=False), nn.Linear(64, 128, bias=False))
    optimizer = optim.AdamW8bit(model.parameters())
    manager = optim.GlobalOptimManager.get_instance()
    manager.register_module_override(model[0], "weight", {"optim_bits": 32})
    manager.override_config(model[2].weight, "min_8bit_size", 1 << 20)
    try:
        found = settings_of(optimizer, model.named_parameters()).own_class
    finally:
        manager.initialize()
    assert found is not None
    assert found.whole
    states = {name: set(plan.states) for (_, name), plan in found.plans.items()}
    wide = {"state1", "state2", "step"}
    assert states == {"0.weight": wide, "1.weight": {*wide, "qmap1", "qmap2", "absmax1", "absmax2"}, "2.weight": wide}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (ByName, "it keeps a state under 'global', which is no parameter"),
        (Writing, "it sets attributes of parameters"),
        (Naming, "param_names"),
        (Scaling, "KeyError: 'names'"),
        (Counting, "it keeps rate outside of the states of parameters"),
    ],
)
def test_what_a_trial_finds_of_attributes(make: Any, said: str) -> None:
    model = net()
    named: Any = model.named_parameters() if make is Naming else model.parameters()
    model[1].weight.factor = 0.5  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=said):
        settings_of(make(named), model.named_parameters())
    with pytest.raises(ConfigError, match=said):
        settings_of(ChainedOptimizer(make(list(named) or model.parameters())), model.named_parameters())


def test_a_chain_keeps_what_its_parts_change_in_themselves() -> None:
    model = net()
    chain = ChainedOptimizer(part := Counting(model.parameters()))
    for _ in range(3):
        used(chain, model.parameters())
    assert part.rate == 0.125


def test_all_parts_of_a_chain_are_replaced() -> None:
    model = net()
    parts = SGD(model[0].parameters(), lr=1.0), SGD(model[1].parameters(), lr=1.0)
    chain: Any = ChainedOptimizer(*parts)
    engine: Any = None
    optimizer = ShardedOptimizer(chain, engine, 1.0)
    for each in (chain, *parts):
        assert optimizer.stands_for(each)
        with pytest.raises(PhaseError, match="the model is partitioned now"):
            each.step()


def two_groups(make: Callable[..., Optimizer], second: dict[str, Any], model: nn.Sequential) -> Optimizer:
    return make([{"params": model[0].parameters()}, {"params": model[1].parameters(), **second}])


@pytest.mark.parametrize(
    ("make", "second", "name"),
    [
        (SGD, {}, "sgd"),
        (SGD, {"momentum": 0.5}, "sgd"),
        (SGD, {"momentum": 0.5, "nesterov": True, "maximize": True}, "sgd"),
        (SGD, {"momentum": 0.5, "dampening": 0.5}, None),
        (Adam, {}, "adam"),
        (Adam, {"amsgrad": True}, None),
        (Adam, {"decoupled_weight_decay": True}, None),
        (AdamW, {}, "adamw"),
        (AdamW, {"decoupled_weight_decay": False}, None),
        (Adagrad, {"lr_decay": 0.5}, "adagrad"),
        (torch.optim.RMSprop, {}, None),
    ],
)
def test_a_fused_update_is_taken_where_it_has_all_options(make: Any, second: dict[str, Any], name: str | None) -> None:
    model = net()
    optimizer = two_groups(make, second, model)
    found = settings_of(optimizer, model.named_parameters())
    assert (found.own_class is None) == (name is not None)
    if name is not None:
        assert (found.name, found.momentum) == (name, second.get("momentum", 0.0))
    else:
        assert found.own_class is not None
        assert {id(own) for own, _ in found.own_class.parts} == {id(optimizer)}
        assert sorted(found.own_class.plans) == [(0, "0.bias"), (0, "0.weight"), (1, "1.bias"), (1, "1.weight")]
    assert found.members == (("0.weight", "0.bias"), ("1.weight", "1.bias"))


def patched(optimizer: Any, wrap: Callable[[Any], Any] = lambda step: step) -> None:
    """Replace `step` on the object by one that looks like it, before or after a scheduler has."""
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    original = optimizer.step
    optimizer.step = wrap(MethodType(torch.no_grad()(wraps(original)(lambda self: original())), optimizer))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_a_step_that_torch_wraps_is_that_of_the_class_and_another_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer: Any = AdamW(model.parameters())
    settings = settings_of(optimizer, model.named_parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step = torch.compile(optimizer.step)
    assert settings_of(optimizer, model.named_parameters()) == settings
    assert settings.own_class is None
    original: Any = AdamW.step
    monkeypatch.setattr(AdamW, "step", wraps(original)(lambda self, closure=None: original(self, closure)), raising=False)
    assert settings_of(AdamW(model.parameters()), model.named_parameters()).own_class is not None


def used(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    for each in parameters:
        each.grad = torch.zeros_like(each)
    optimizer.step()


@pytest.mark.parametrize(
    ("make", "change", "said"),
    [
        (SGD, lambda each, _: each.register_step_pre_hook(lambda *_: None), "step hooks, which would not run"),
        (SGD, lambda each, _: each.register_step_post_hook(lambda *_: None), "step hooks, which would not run"),
        (SGD, lambda each, _: patched(each), r"has a step\(\) of its own instead of its class's, which would not run"),
        (Adagrad, used, "Adagrad has states before its first step"),
        (AdamW, used, "AdamW has states before its first step"),
        (AdamW, lambda each, _: each.param_groups[1].update(differentiable=True), "differentiable=True"),
        (Adagrad, lambda each, _: each.param_groups[1].update(initial_accumulator_value=1.0), "has states before"),
    ],
)
def test_what_an_update_of_shards_would_lose_is_refused(make: Any, change: Callable[..., object], said: str) -> None:
    model = net()
    optimizer = two_groups(make, {}, model)
    assert settings_of(optimizer, model.named_parameters()).own_class is None
    change(optimizer, model.parameters())
    with pytest.raises(ConfigError, match=said):
        settings_of(optimizer, model.named_parameters())
    with pytest.raises(ConfigError, match=r"has 2 parameters, such as one of shape \(6, 8\), that the model has not"):
        settings_of(optimizer, model[1].named_parameters())


@pytest.mark.parametrize(
    ("make", "change", "said"),
    [
        (SGD, lambda each: each.register_step_pre_hook(lambda *_: None), "step hooks, which would not run"),
        (Rated, patched, r"has a step\(\) of its own instead of its class's"),
        (Rated, lambda each: setattr(each, "eval", each.zero_grad), r"has train\(\) and eval\(\)"),
        (Adagrad, bool, "not taken over but for those of an Adagrad alone"),
    ],
)
def test_what_parts_of_a_chain_would_lose_is_refused(make: Any, change: Callable[[Any], object], said: str) -> None:
    model = net()
    part = make(model[0].parameters(), lr=0.5)
    change(part)
    with pytest.raises(ConfigError, match=said):
        settings_of(ChainedOptimizer(part, AdamW(model[1].parameters())), model.named_parameters())


def test_a_chain_steps_each_part_over_its_own_groups() -> None:
    torch.manual_seed(1)
    chained, apart = net(), net()
    parts = [
        [SGD(model[0].parameters(), lr=0.5, momentum=0.5), AdamW(model[1].parameters(), lr=0.25, weight_decay=0.5)]
        for model in (chained, apart)
    ]
    chain = ChainedOptimizer(*parts[0])
    assert chain.param_groups == [*parts[0][0].param_groups, *parts[0][1].param_groups]
    x = torch.randn(3, 8)

    def closure() -> float:
        assert torch.is_grad_enabled()
        chained.zero_grad()
        loss = chained(x).square().sum()
        loss.backward()
        return float(loss.detach())

    for _ in range(3):
        apart.zero_grad()
        loss = apart(x).square().sum()
        loss.backward()
        assert chain.step(closure) == float(loss.detach())
        for each in parts[1]:
            each.step()
    for found, wanted in zip(chained.parameters(), apart.parameters(), strict=True):
        assert torch.equal(found, wanted)
    del chain.param_groups[1:]
    before = chained[1].weight.detach().clone()
    chain.step()
    assert torch.equal(chained[1].weight, before)
