"""Predicted memory, by hand on a small plan. A run whose states cannot fit is refused, with what would need less."""

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

import zeromesh.options
from tests.conformance.models import stack
from zeromesh.errors import StorageError
from zeromesh.flat.layout import ParameterSpec, build_layout
from zeromesh.offload import STAGING_BYTES, Purpose, TierChoice, stream_bytes
from zeromesh.offload.accelerator import DeviceMemory
from zeromesh.offload.io.file_tier import THREAD_BYTES
from zeromesh.offload.memory.allocation import PinnedBudget
from zeromesh.options import OffloadOptions, Precision, ZeroOptions
from zeromesh.settings.keys import AverageSettings, OuterSettings
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.setup import memory_check
from zeromesh.units.build import kept_buckets, plan_layouts
from zeromesh.units.plan import UnitPlan, plan_model
from zeromesh.zero.memory_model import MemoryBytes, MemoryModel

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SMALLER = "make the model smaller (model.config), or use more hosts"
TRANSPORTS = {1: "local", 2: "gloo", 4: "shared"}


def on_meta() -> Any:
    with torch.device("meta"):
        return stack(size=2048)


def refusal(monkeypatch: pytest.MonkeyPatch, ranks: int, free: int, *, on_device: int | None = None, **changes: Any) -> str:
    """What is said where so many bytes are free, on the host and on each of its devices if it has any; empty where that is
    enough."""
    monkeypatch.setattr(memory_check, "available_bytes", lambda: (free + 1) // 2)
    monkeypatch.setattr(memory_check, "swap_bytes", lambda: free // 2)
    if on_device is not None:
        memory = DeviceMemory(free=on_device - 70, total=1 << 30, allocated=30, reserved=100, peak=0)
        monkeypatch.setattr(memory_check, "device_memory", lambda device: memory)
        monkeypatch.setattr(zeromesh.options, "device_memory", lambda device: memory)
    mesh: Any = SimpleNamespace(
        device=CPU if on_device is None else GPU,
        shard=SimpleNamespace(size=ranks),
        experts=SimpleNamespace(size=1),
        replicate=SimpleNamespace(size=1),
        environment=SimpleNamespace(local_world_size=ranks),
    )
    transport = TRANSPORTS[ranks] if on_device is None or ranks == 1 else "nccl"
    try:
        notes = memory_check.HostMemory(on_meta(), options(**changes), mesh, transport, 0, None).check()
        return "".join(note for note in notes if not note.startswith("memory: "))
    except StorageError as error:
        return str(error)


def options(**changes: Any) -> ZeroOptions:
    return ZeroOptions(precision=Precision(compute=torch.bfloat16), **changes)


@pytest.mark.parametrize(
    ("ranks", "stage", "advice"),
    [
        (1, 0, f"{SMALLER} with a zero.stage above 0"),
        (1, 1, SMALLER),
        (1, 3, SMALLER),
        (2, 0, f"set zero.stage to 3, which needs *, {SMALLER} with a zero.stage"),
        (2, 2, f"set zero.stage to 3, which needs *, {SMALLER}"),
        (2, 3, SMALLER),
        (4, 0, f"set zero.stage to 3, which needs *, {SMALLER} with a zero.stage"),
        (4, 3, SMALLER),
    ],
)
def test_the_advice_fits_the_stage(monkeypatch: pytest.MonkeyPatch, ranks: int, stage: int, advice: str) -> None:
    said = refusal(monkeypatch, ranks, free=1, stage=stage)
    before, _, after = advice.partition("*")
    said = said.partition("are free; ")[2]
    assert said.startswith(before)
    assert after in said
    assert ("zero.stage" in said) == ("zero.stage" in advice)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_needed_is_what_is_predicted(monkeypatch: pytest.MonkeyPatch, ranks: int, stage: int) -> None:
    plan = plan_model(on_meta(), torch.bfloat16)
    found = MemoryModel(plan_layouts(plan, ranks), options(stage=stage, gathered_budget=0), ranks, TRANSPORTS[ranks])
    needed = ranks * found.total
    assert refusal(monkeypatch, ranks, free=needed, stage=stage, gathered_budget=0) == ""
    first, nbytes = next(iter(found.terms.items()))
    wanted = f"need at least {human_bytes(needed)} on this host ({human_bytes(ranks * nbytes)} {first.value}, "
    assert wanted in refusal(monkeypatch, ranks, free=needed - 1, stage=stage, gathered_budget=0)


def test_a_budget_that_the_configuration_names_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_model(on_meta(), torch.bfloat16)
    totals = [
        2 * MemoryModel(plan_layouts(plan, 2), options(stage=3, gathered_budget=budget), 2, "gloo").total for budget in (0, 10**9)
    ]
    assert totals[0] < totals[1]
    assert refusal(monkeypatch, 2, free=totals[0], stage=3) == ""
    assert refusal(monkeypatch, 2, free=totals[0], stage=3, gathered_budget=10**9)
    assert refusal(monkeypatch, 2, free=totals[1], stage=3, gathered_budget=10**9) == ""


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("trained", [True, False])
def test_what_is_kept_by_default_takes_no_memory_that_a_step_does_not_need(compute: torch.dtype, trained: bool) -> None:
    """Of a bfloat16 copy beside masters the root alone; all where what is gathered is the only copy."""
    layouts = plan_layouts(plan_model(on_meta().requires_grad_(trained), compute), 4)
    given = [ZeroOptions(precision=Precision(compute=compute), gathered_budget=each) for each in ("auto", 0, 1 << 40)]
    found, none, whole = (MemoryModel(layouts, each, 4, "shared") for each in given)
    assert found.total <= none.total
    assert found.kept_bytes == (whole.kept_bytes if compute == torch.float32 or not trained else found.kept_bytes)
    assert found.kept_bytes < whole.kept_bytes or not trained or compute == torch.float32
    assert whole.total > none.total or not trained or compute == torch.float32


ROOM = 1 << 40
"""Bytes of a host that has enough."""


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_devices_states_are_predicted_as_a_hosts(monkeypatch: pytest.MonkeyPatch, ranks: int, stage: int) -> None:
    plan = plan_model(on_meta(), torch.bfloat16)
    transport = "local" if ranks == 1 else "nccl"
    found = MemoryModel(plan_layouts(plan, ranks), options(stage=stage), ranks, transport, GPU)
    assert not found.host_terms
    assert refusal(monkeypatch, ranks, 1, on_device=int(1.12 * found.total), stage=stage) == ""
    tight = refusal(monkeypatch, ranks, 1, on_device=int(1.1 * found.total), stage=stage)  # leaves less than a tenth
    assert tight.startswith("WARNING: memory: states need")
    said = refusal(monkeypatch, ranks, ROOM, on_device=found.total - 1, stage=stage)
    assert "on each CUDA device" in said
    assert "offload.optimizer to host, which needs" in said
    assert "of the host's memory" in said
    assert "hosts" not in said


def test_what_rests_on_the_host_counts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = OffloadOptions(optimizer=TierChoice(tier="host"))
    plan, changed = plan_model(on_meta(), torch.bfloat16), options(stage=3, offload=offload)
    assert refusal(monkeypatch, 2, ROOM, on_device=ROOM, stage=3, offload=offload) == ""
    without = MemoryModel(plan_layouts(plan, 2), options(stage=3), 2, "nccl", GPU)
    found = MemoryModel(plan_layouts(plan, 2), changed, 2, "nccl", GPU)
    moved = sum(found.host_terms.values())
    added = found.terms[Purpose.STAGING] + found.terms[Purpose.PARAMETERS]  # Buffers, and a copy that is gathered.
    assert moved + sum(found.terms.values()) - added == sum(without.terms.values())
    host = 2 * moved
    assert refusal(monkeypatch, 2, host, on_device=ROOM, stage=3, offload=offload) == ""
    assert "on this host" in refusal(monkeypatch, 2, host - 1, on_device=ROOM, stage=3, offload=offload)


def test_what_is_pinned_is_said() -> None:
    assert memory_check.pinned_notes(PinnedBudget()) == []
    (said,) = memory_check.pinned_notes(PinnedBudget(used=3 << 30))
    assert said == "offload: 3.0 GiB of the host's memory are pinned for copies to and from the device"
    (said,) = memory_check.pinned_notes(PinnedBudget(used=3 << 30, pageable=1 << 30))
    assert said.startswith("WARNING: offload: 3.0 GiB of the host's memory are pinned")
    assert "and 1.0 GiB are not" in said


def _layout(nbytes: int) -> Any:
    return SimpleNamespace(
        parts=1,
        travelling_nbytes=lambda shards: nbytes,
        first=SimpleNamespace(requires_grad=True, dtype=torch.bfloat16, codec=None, experts="", in_experts=False),
        dividers=1,
    )


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (49, [False, False, False]),
        (50, [True, False, False]),
        (100, [False, False, True]),
        (299, [True, False, True]),
        (300, [False, True, True]),
        (349, [False, True, True]),
        (350, [True, True, True]),
    ],
)
def test_a_budget_keeps_what_fits_it_exactly_the_last_unit_first(budget: int, kept: list[bool]) -> None:
    units: Any = [[_layout(50)], [_layout(120), _layout(80)], [_layout(100)]]
    found = kept_buckets(units, ZeroOptions(stage=3, gathered_budget=budget), CPU, "shared")
    assert found == [[stays] * len(unit) for stays, unit in zip(kept, units, strict=True)]


@pytest.mark.parametrize(("kind", "kept"), [("local", True), ("shared", True), ("gloo", False)])
def test_no_budget_is_an_automatic_one(kind: str, kept: bool) -> None:
    budgets: Any = ("auto", None)
    for budget in budgets:
        assert kept_buckets([[_layout(50)]], ZeroOptions(gathered_budget=budget), CPU, kind) == [[kept]]


_P = 4096  # elements of each of three units: no rank count used here makes padding
Transport = Literal["local", "shared", "gloo"]


def plan(dtype: torch.dtype = torch.bfloat16, trained: tuple[bool, ...] = (True, True, True)) -> list[UnitPlan]:
    return [
        UnitPlan(module=name, specs=(ParameterSpec(fqn=f"{name}.w", shape=(64, _P // 64), dtype=dtype, requires_grad=grad),))
        for name, grad in zip(("", "a", "b"), trained, strict=True)
    ]


INSIDE = {"optimizer_in_backward": True, "on_nonfinite": "stop"}
BY_HAND: dict[str, tuple[Transport, int, ZeroOptions, dict[str, int], int | None]] = {
    "one rank keeps everything": (
        "local", 1, options(stage=2), {"parameters": 6 * _P, "master": 12 * _P, "moments": 24 * _P, "gradients": 12 * _P}, 0),
    # Gathered: the root, the unit that computes and the one that is fetched.
    "stage 3 over gloo keeps shards alone": (
        "gloo", 4, options(stage=3),
        {"parameters": 0, "master": 3 * _P, "moments": 6 * _P, "gradients": 3 * _P, "gradient_buckets": 8 * _P}, 6 * _P,
    ),
    "without prefetch": ("gloo", 4, options(stage=3, prefetch=0), {}, 4 * _P),
    "shared pages count once over the ranks": (
        "shared", 4, options(stage=3, gathered_budget=1 << 40), {"parameters": 6 * _P // 4, "gradient_buckets": 4 * _P}, 0),
    "of which the root's stay": ("shared", 4, options(stage=3), {"parameters": 2 * _P // 4}, _P),
    "a budget keeps the last units first": ("gloo", 2, options(stage=3, gathered_budget=2 * _P), {"parameters": 2 * _P}, 4 * _P),
    "sums before one reduction": (
        "shared", 2, options(stage=1, accumulation=4), {"partial_gradients": 12 * _P, "gradient_buckets": 8 * _P}, None),
    "none where each microbatch is reduced": ("shared", 2, options(stage=2, accumulation=4), {"partial_gradients": 0}, None),
    "averages are as large as one moment": (
        "shared", 2, options(stage=3, average=AverageSettings(decay=0.9)), {"averages": 6 * _P, "moments": 12 * _P}, None),
    "an outer optimizer keeps as much as a moment": (
        "shared", 2, options(stage=3, outer=OuterSettings(lr=0.7)), {"moments": 18 * _P}, None),
    "and its momentum": ("shared", 2, options(stage=3, outer=OuterSettings(momentum=0.9)), {"moments": 24 * _P}, None),
    "but averages of replicas nothing": ("shared", 2, options(stage=3, outer=OuterSettings()), {"moments": 12 * _P}, None),
    "the optimizer inside backward needs few gradients": ("shared", 2, options(stage=3, **INSIDE), {"gradients": 4 * _P}, None),
    "of one rank those of the root and of a unit": ("local", 1, options(stage=0, **INSIDE), {"gradients": 8 * _P}, 0),
    "of equal ranks all": ("gloo", 2, options(stage=0, **INSIDE), {"gradients": 12 * _P, "master": 12 * _P}, 0),
    "one rank has no sums to reduce": ("local", 1, options(stage=1, accumulation=4), {"partial_gradients": 0}, 0),
    "reduced once a step": ("shared", 2, options(stage=2, accumulation=4, reduce_once=True), {"partial_gradients": 12 * _P}, 0),
    "sums of several backwards stay": ("shared", 2, options(stage=2, accumulation=2, **INSIDE), {"gradients": 6 * _P}, 0),
}  # fmt: skip
"""Of three units of `_P` elements in bf16, masters and sums in fp32, AdamW: transport, ranks, options, bytes by purpose, and
those that are gathered for a while."""


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    transport, parts, how, terms, gathered = BY_HAND[name]
    found = MemoryModel(plan_layouts(plan(), parts), how, parts, transport)
    assert {purpose: found.terms.get(Purpose[purpose.upper()], 0) for purpose in terms} == terms
    assert gathered in (None, found.gathered)
    if len(terms) > 3:
        assert len(found.terms) == sum(map(bool, terms.values()))


def test_masters_of_the_compute_dtype_are_the_parameters_and_frozen_parameters_have_no_states() -> None:
    for stage, wanted in ((2, 0), (3, 6 * _P)):  # At stage 3 nothing stays gathered that they could be part of.
        found = MemoryModel(plan_layouts(plan(torch.float32), 2), ZeroOptions(stage=stage), 2, "gloo")
        assert found.terms.get(Purpose.MASTER, 0) == wanted
    terms = {"parameters": 6 * _P, "master": 2 * _P, "moments": 4 * _P, "gradients": 2 * _P, "gradient_buckets": 8 * _P}
    found = MemoryModel(plan_layouts(plan(trained=(False, True, False)), 2), options(stage=1), 2, "gloo")
    assert found.terms == {Purpose[name.upper()]: nbytes for name, nbytes in terms.items()}


def test_states_on_files_pass_through_memory() -> None:
    """Two shards of gradients that are written, the next one, and the buffers of updates and of the threads of files."""
    how = options(stage=1, offload=OffloadOptions(optimizer=TierChoice(tier="file")))
    found = MemoryModel(plan_layouts(plan(), 2), how, 2, "gloo")
    assert found.files == {Purpose.MASTER: 6 * _P, Purpose.MOMENTS: 12 * _P, Purpose.GRADIENTS: 6 * _P}
    assert found.transit_bytes == 3 * 2 * _P
    assert found.terms[Purpose.STAGING] == stream_bytes(4, 2 * _P, STAGING_BYTES) + THREAD_BYTES
    assert found.trained == {torch.bfloat16: (3 * _P, 3 * _P // 2)}


HOST = OffloadOptions(optimizer=TierChoice(tier="host"), staging_bytes=0)
IN_BACKWARD: Any = {"optimizer_in_backward": True, "on_nonfinite": "stop", "gradient_slots": 3}


@pytest.mark.parametrize(
    ("parts", "kind", "changes", "expected"),
    [
        # Masters, two moments and sums in fp32 of 448 elements a rank; bfloat16 of a frozen shard, and what is gathered.
        (2, "gloo", {}, (1792, 3584, 0, 1792, 0, 128, 2 * 2 * 1024, 256 + 1536, 0)),
        (2, "shared", {"average": AverageSettings(decay=0.9)}, (1792, 3584, 1792, 1792, 0, 128, 2 * 1024, 896, 0)),
        (2, "shared", {"stage": 0}, (3584, 7168, 0, 3584, 0, 2048, 2 * 1024, 0, 0)),
        (2, "shared", {"stage": 1, "accumulation": 2}, (1792, 3584, 0, 1792, 3584, 1024, 2 * 2048, 0, 0)),
        (1, "local", {"stage": 1, "accumulation": 2}, (3584, 7168, 0, 3584, 0, 1920, 0, 0, 0)),
        # Gradients that pass through: the root's, which are the last, and those in flight, of two units at most.
        (2, "gloo", IN_BACKWARD, (1792, 3584, 0, 4 * (64 + 2 * 256 - 64), 0, 128, 2 * 3 * 1024, 1792, 0)),
        (2, "gloo", {**IN_BACKWARD, "stage": 0}, (3584, 7168, 0, 3584, 0, 2048, 2 * 3 * 1024, 0, 0)),
        (1, "local", IN_BACKWARD, (3584, 7168, 0, 4 * (128 + 512), 0, 128, 0, 1792, 0)),
        # Beside an accelerator: gathered copies of what rests on the host, and the three longest gradient shards on the way.
        (2, "nccl", {"offload": HOST}, (0, 0, 0, 0, 0, 896 + 128, 2 * 2048, 1792, 1792)),
        (2, "nccl", {"offload": HOST, "stage": 2}, (0, 0, 0, 0, 0, 2048, 2 * 2048, 0, 1792)),
    ],
)
def test_bytes_are_those_of_a_model_counted_by_hand(parts: int, kind: str, changes: Any, expected: Any) -> None:
    """Of 128, 256, 512 and 64 elements in a root and three units, the last of them frozen, in bfloat16."""
    specs = [
        ParameterSpec(fqn=str(numel), shape=(numel,), dtype=torch.bfloat16, requires_grad=numel > 64)
        for numel in (128, 256, 512, 64)
    ]
    units = [[build_layout(spec.fqn, [spec], parts)] for spec in specs]
    device, chosen = (
        GPU if kind == "nccl" else CPU,
        ZeroOptions(**{"precision": Precision(compute=torch.bfloat16), "gathered_budget": 0, **changes}),
    )
    found = MemoryModel(units, chosen, parts, kind, device)
    purposes = ("MASTER", "MOMENTS", "AVERAGES", "GRADIENTS", "PARTIAL_GRADIENTS", "PARAMETERS", "GRADIENT_BUCKETS")
    terms = [found.terms.get(Purpose[name], 0) for name in purposes]
    assert (*terms, found.gathered, found.transit_bytes) == expected
    assert found.trained == {torch.bfloat16: (896, 896 // parts)}
    if kind == "nccl":
        assert [found.host_terms[Purpose[name]] for name in ("MASTER", "MOMENTS", "GRADIENTS")] == [1792, 3584, 1792]


def test_what_exceeds_a_room_is_named_first_of_the_device() -> None:
    room = MemoryBytes(device=2, host=3, disk=4)
    needs = [(2, 3, 4), (3, 4, 5), (0, 4, 5), (2, 3, 5)]
    found = [MemoryBytes(device=device, host=host, disk=disk).beyond(room) for device, host, disk in needs]
    assert found == ["", "device", "host", "disk"]
    assert [MemoryBytes(device=device, host=3, disk=9).critical for device in (0, 2)] == [3, 2]
