"""How a model is built, passed or given buffers: notes for the user, refusals, and what is kept of what it had."""

from typing import Any

import pytest
import torch
from torch import nn

from zeromesh.errors import ConfigError, LayoutError
from zeromesh.flat.layout import StridedRows
from zeromesh.intervals import Interval
from zeromesh.weight_init.weight_sources import (
    BuiltSource,
    LostValuesError,
    ParameterSource,
    SeededSource,
    Skeleton,
    WriteLog,
    build_deferred,
    canonical_names,
    check_interval,
    hooked_parameters,
    is_pretrained_model,
    materialize_buffers,
    seeded_cpu,
    wrap_passed_model,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.words.weight


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def test_draws_are_seeded_by_name_and_leave_the_generator_alone() -> None:
    def drawn(seed: int, name: str) -> float:
        with seeded_cpu(seed, name):
            assert not torch.is_grad_enabled()
            return float(torch.rand(()))

    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = [drawn(1, "a"), drawn(2, "a"), drawn(1, "b"), drawn(1, "a")]
    assert torch.equal(torch.get_rng_state(), before)
    assert (found[0] == found[3], len(set(found))) == (True, 3)
    with pytest.raises(ZeroDivisionError), seeded_cpu(1, "a"):
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


def test_a_source_gives_and_releases_parameters_by_any_of_their_names() -> None:
    model = Tied()
    assert canonical_names(model) == {"words.weight": "words.weight", "head.weight": "words.weight"}
    source = BuiltSource(model)
    wanted = model.words.weight.detach().reshape(-1)
    assert torch.equal(source.read("head.weight", 2, 5), wanted[2:5])
    out = torch.zeros(4, dtype=torch.float64)
    columns = StridedRows(count=4, width=3, columns=(Interval(start=1, end=3),))
    source.fill("head.weight", columns, Interval(start=1, end=5), out)
    assert torch.equal(out, wanted.view(4, 3)[:, 1:].reshape(-1)[1:5].double())
    assert source.file_position("head.weight", 0, torch.float32) is None
    assert source.buffer("any") is None
    for start, end in ((-1, 2), (3, 2), (0, 13)):
        with pytest.raises(LayoutError, match=rf"w: interval \[{start}, {end}\) does not lie in its 12 elements"):
            check_interval("w", start, end, 12)
    check_interval("w", 12, 12, 12)
    source.release("head.weight")
    with pytest.raises(LayoutError, match="is not, or no longer, among the 0 parameters"):
        source.read("words.weight", 0, 1)
    source = BuiltSource(model)
    source.close()
    with pytest.raises(LayoutError, match="no longer"):
        source.read("words.weight", 0, 1)
    with pytest.raises(LostValuesError, match=r"initial values of words\.weight are not known"):
        BuiltSource(on_meta(Tied)).read("words.weight", 0, 1)


def test_a_module_is_drawn_once_until_another_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    source = SeededSource(model, 0)
    drawn: list[str] = []
    recompute = source.skeleton.recompute
    monkeypatch.setattr(source.skeleton, "recompute", lambda fqn, *others: drawn.append(fqn) or recompute(fqn, *others))
    for name in ("0.weight", "0.bias", "1.bias", "1.weight", "0.weight"):
        source.read(name, 0, 3)
    assert drawn == ["0", "1", "0"]


def test_equal_modules_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(3, 3), (3, 3), (3, 4), (4, 3)]
    source = SeededSource(on_meta(lambda: nn.Sequential(*(nn.Linear(*each) for each in shapes), nn.Bilinear(3, 3, 3))), 0)
    tried: list[str] = []
    unset = source._unset_in
    monkeypatch.setattr(source, "_unset_in", lambda owner, leaves: tried.append(owner) or unset(owner, leaves))
    assert source.unset_parameters() == ()
    assert tried == ["0", "2", "3", "4"]


class Lost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.empty(2)), nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(2.0))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.weight.register_hook(lambda grad: grad)


def test_what_the_weights_have_stored_need_not_be_computed() -> None:
    assert "loses the values of scale" in build_deferred(Lost, 0).notes[0]
    assert "loses the values of table" in build_deferred(Lost, 0, stored=lambda _: frozenset({"scale"})).notes[0]
    found = build_deferred(Lost, 0, stored=lambda _: frozenset({"scale", "table"}))
    assert found.notes == ()
    assert isinstance(found.source, SeededSource)
    buffers = dict(found.model.named_buffers())
    assert buffers["table"].is_meta  # The trial has left the model as it was.


def test_hooks_on_gradients_are_kept_by_building_on_a_cpu() -> None:
    found = build_deferred(Hooked, 0)
    assert "it registers hooks on the gradients of weight" in found.notes[0]
    assert not any(each.is_meta for each in found.model.parameters())
    model = Tied()
    assert hooked_parameters(model) == ()
    model.words.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert hooked_parameters(model) == ("words.weight",)
    with pytest.raises(LayoutError, match="weight: the model was passed on the meta device with hooks on gradients"):
        wrap_passed_model(on_meta(Hooked), 0)
    mixed = nn.Sequential(Hooked(), on_meta(lambda: nn.Linear(2, 2)))
    assert isinstance(wrap_passed_model(mixed, 0).source, SeededSource)  # What has values keeps its hooks.


def test_errors_of_the_configuration_are_not_taken_for_those_of_the_meta_device() -> None:
    def build() -> nn.Module:
        raise ConfigError("on purpose")

    with pytest.raises(ConfigError, match="on purpose"):
        build_deferred(build, 0)

    def fails(error: type[Exception]) -> nn.Module:
        if torch.zeros(1).is_meta:
            raise error("needs a value")
        return nn.Linear(2, 2)

    found = build_deferred(lambda: fails(KeyError), 0)
    assert "it cannot be built on the meta device (KeyError: 'needs a value')" in found.notes[0]
    with pytest.raises(MemoryError):
        build_deferred(lambda: fails(MemoryError), 0)


class Stored(ParameterSource):
    def buffer(self, name: str) -> torch.Tensor | None:
        return torch.full((2,), 7.0, dtype=torch.float64) if name == "inner.table" else None


def test_buffers_on_meta_are_read_computed_or_told() -> None:
    def build() -> nn.Module:
        inner = nn.BatchNorm1d(2)
        inner.register_buffer("table", torch.zeros(2))
        inner.register_buffer("codes", torch.arange(3))
        inner.register_buffer("none", None)
        inner.parts = [torch.zeros(1)]  # type: ignore[assignment]
        return nn.ModuleDict({"inner": inner})

    model: Any = on_meta(build)
    model.inner.register_buffer("built", torch.full((2,), 3.0))
    assert materialize_buffers(model, "cpu", 0, source=Stored()) == ("inner.parts", "inner.codes")
    inner = model.inner
    assert (inner.table.tolist(), inner.table.dtype) == ([7.0, 7.0], torch.float32)
    assert (inner.running_var.tolist(), inner.built.tolist(), inner.none) == ([1.0, 1.0], [3.0, 3.0], None)
    assert inner.codes.dtype == torch.int64
    assert "inner.table" in materialize_buffers(on_meta(build), "cpu", 0)


def test_a_skeleton_shares_attributes_and_no_memory() -> None:
    model: Any = Tied()
    model.words.weight.requires_grad_(False)
    model.again, model.factor = model.words, 3
    root: Any = Skeleton(model).root
    assert root.factor == 3
    assert root.again is root.words is not model.words
    assert root.head.weight is root.words.weight
    assert root.words.weight.is_meta
    assert not root.words.weight.requires_grad
    assert [type(each) for each in Skeleton(model).path("words")] == [Tied, nn.Embedding]
    assert not is_pretrained_model(model)


def test_a_log_tells_what_was_written_where() -> None:
    with WriteLog() as log, torch.device("meta"):
        first, second = torch.empty(4), torch.empty(4)
        nn.init.normal_(first, std=0.5)
        second[2:].zero_()
        double, both = second.double(), first + second
    ((name, plain, numel, offset),) = log.writes_to(first)
    assert (name, "0.5" in plain, numel, offset) == ("aten.normal_.default", True, 4, 0)
    assert [each[2:] for each in log.writes_to(second)] == [(2, 2)]
    assert log.writes_to(double) == log.writes_to(second)
    assert log.writes_to(both) == ()


def test_a_model_on_meta_is_told_what_it_has_lost() -> None:
    assert wrap_passed_model(nn.Linear(2, 2), 0).notes == ()
    (note,) = wrap_passed_model(on_meta(lambda: nn.Linear(2, 2)), 0).notes
    assert note.startswith("the model was passed on the meta device: weights of Linear are drawn by `reset_parameters`")
