"""The small parts of a pipeline: messages, timelines, stubs, signatures, and batches of generation on a single rank."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zeromesh.errors import DataError, LayoutError, PhaseError
from zeromesh.pipeline.deferred_weight_grad import WeightQueue
from zeromesh.pipeline.executor import signature_of, take_gradient
from zeromesh.pipeline.generation import InterleavedBatches, StagedForward
from zeromesh.pipeline.pipeline import MicrobatchWork, StepDriver, ZeroRunner
from zeromesh.pipeline.schedule import (
    UNIT_TIMES,
    Action,
    Kind,
    PipelineSchedule,
    Timeline,
    make_schedule,
    message_of,
    message_order,
)
from zeromesh.pipeline.stages.build import BlockStub, NanStub, StageSlot, Stub, meta_copy
from zeromesh.pipeline.stages.model_anatomy import HIDDEN, Anatomy

F, B, INPUT, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
SCHEDULE = PipelineSchedule(name="any", ranks=2, chunks=2, microbatches=1, actions=((), ()))
"""Stages 0 to 3 on ranks 0, 1, 0, 1."""


@pytest.mark.parametrize(
    ("rank", "chunk", "kind", "sent", "received"),
    [
        (0, 0, F, (0, 1, 1), None),
        (1, 0, F, (1, 0, 2), (0, 1, 1)),
        (1, 1, F, None, (0, 1, 3)),
        (1, 1, B, (1, 0, 2), None),
        (0, 1, INPUT, (0, 1, 1), (1, 0, 2)),
        (0, 0, B, None, (1, 0, 0)),
        (0, 1, W, None, None),
    ],
)
def test_results_go_to_the_next_stage_and_gradients_to_the_one_before(
    rank: int, chunk: int, kind: Kind, sent: Any, received: Any
) -> None:
    action = Action(kind=kind, chunk=chunk, microbatch=5)
    for wanted, incoming in ((sent, False), (received, True)):
        message = message_of(SCHEDULE, rank, action, received=incoming)
        assert (message is None) == (wanted is None)
        if message is not None:
            assert (message.source, message.target, message.stage) == wanted
            assert (message.microbatch, message.gradient) == (5, kind is not F)
            what = "activations" if kind is F else "gradients"
            assert str(message) == f"{what} of microbatch 5 for stage {wanted[2]}"
    assert str(action) == f"{kind.value}5" + (f" of chunk {chunk}" if chunk else "")


def test_schedules_count_their_stages_and_times() -> None:
    assert SCHEDULE.stages == 4
    assert str(SCHEDULE) == "pipeline schedule any of 2 ranks x 2 chunks"
    assert UNIT_TIMES == {F: 1.0, B: 2.0, INPUT: 1.0, W: 1.0}
    nothing = Timeline(actions=((), ()), starts=((), ()), ends=((), ()))
    assert (nothing.duration, nothing.bubbles, nothing.bubble) == (0.0, (0.0, 0.0), 0.0)
    half = Timeline(actions=((), ()), starts=((0.0,), (1.0, 3.0)), ends=((4.0,), (2.0, 4.0)))
    assert (half.duration, half.bubbles, half.bubble) == (4.0, (0.0, 0.5), 0.25)


def test_each_rank_has_its_neighbours_messages_in_the_order_of_their_times() -> None:
    schedule = make_schedule("1f1b", ranks=3, microbatches=2)
    order, ends = message_order(schedule, 1)
    assert [(moment, str(message)) for moment, message in order] == [
        (1.0, "activations of microbatch 0 for stage 1"),
        (2.0, "activations of microbatch 1 for stage 1"),
        (2.0, "activations of microbatch 0 for stage 2"),
        (3.0, "activations of microbatch 1 for stage 2"),
        (5.0, "gradients of microbatch 0 for stage 1"),
        (7.0, "gradients of microbatch 0 for stage 0"),
        (8.0, "gradients of microbatch 1 for stage 1"),
        (10.0, "gradients of microbatch 1 for stage 0"),
    ]
    assert list(ends.values()) == [2.0, 3.0, 7.0, 10.0]
    assert {message.source for _, message in message_order(schedule, 0)[0]} == {0, 1}


def test_a_signature_has_all_that_shapes_depend_on() -> None:
    batch = {"b": torch.zeros(2, 3), "a": torch.zeros(2).long(), "flag": True}
    found = [signature_of(batch), signature_of({**batch, "flag": False}), signature_of(dict(reversed(batch.items())))]
    assert found[0] == found[1] == found[2]
    with torch.no_grad():
        others = [signature_of(batch)]
    others += [signature_of({**batch, "b": each}) for each in (torch.zeros(3, 2), torch.zeros(2, 3).double())]
    others += [signature_of({"c": batch["b"], "a": batch["a"]})]
    assert len({found[0], *others}) == 5


def test_a_gradient_is_taken_once() -> None:
    tensor = torch.ones(2, requires_grad=True)
    assert take_gradient(tensor).tolist() == [0.0, 0.0]
    tensor.grad = torch.full((2,), 3.0)
    assert take_gradient(tensor).tolist() == [3.0, 3.0]
    assert tensor.grad is None


def test_factors_are_queued_for_one_backward_at_a_time() -> None:
    queue = WeightQueue()
    with (
        queue.deferring((0, 1)),
        pytest.raises(PhaseError, match=r"gradients of weights of \(0, 2\) are queued already"),
        queue.deferring((0, 2)),
    ):
        pass
    with pytest.raises(PhaseError, match=r"of \(0, 1\) are queued already"), queue.deferring((0, 1)):
        pass
    queue.run((0, 1))
    with queue.deferring((0, 1)):
        pass


def anatomy(argument: int | str = 0, outputs: Any = HIDDEN) -> Anatomy:
    return Anatomy(
        body="", blocks="blocks", count=4, hidden_argument=argument, outputs=(outputs,) * 4, before=(), after=(),
        reshapes=False, idle=(),
    )  # fmt: skip


def test_stubs_of_blocks_hand_on_what_was_received_and_keep_what_is_sent() -> None:
    slot = StageSlot(last=3, shares=None)
    block = nn.Linear(3, 3)
    block.width = 7  # type: ignore[assignment]
    stubs = [BlockStub(block, index, anatomy(), slot) for index in range(4)]
    assert list(stubs[0].parameters()) == []
    assert stubs[0].width == 7
    with pytest.raises(AttributeError, match="height"):
        _ = stubs[0].height
    slot.inject_at, slot.capture_at = 0, 2
    x = torch.ones(1, 2, 3)
    with pytest.raises(PhaseError, match="block 0 was to hand on a hidden state, but none was received"):
        stubs[0](x)
    slot.received = torch.full((1, 2, 3), 5.0)
    assert stubs[0](x) is slot.received
    assert slot.captured is None
    assert stubs[1](x) is x
    assert slot.captured is None
    assert stubs[2](x) is x
    assert slot.captured is x
    last = stubs[3](x)
    assert last.shape == x.shape
    assert bool(last.isnan().all())
    named = BlockStub(block, 1, anatomy("hidden", (None, HIDDEN, 3)), slot)
    assert named(0, hidden=x) == (None, x, 3)


def test_a_stub_asks_a_cache_for_a_length_in_its_blocks_place() -> None:
    calls: list[tuple[tuple[int, ...], int]] = []
    cache = SimpleNamespace(
        get_mask_sizes=None,
        layers=[SimpleNamespace(update=1), SimpleNamespace()],
        update=lambda keys, values, layer: calls.append((tuple(keys.shape), layer)),
    )
    slot, x = StageSlot(last=3, shares=None), torch.ones(2, 5, 3)
    for index in range(3):
        BlockStub(nn.Linear(3, 3), index, anatomy(), slot)(x, cache=cache)
    assert calls == [((2, 1, 5, 1), 0), ((2, 1, 5, 1), 2)]
    cache.length_without_layers = True
    BlockStub(nn.Linear(3, 3), 0, anatomy(), slot)(x, cache)
    assert len(calls) == 2


def test_stubs_of_shares_of_the_sequence_give_its_whole_length_at_the_end() -> None:
    decided: list[int] = []
    exchange = SimpleNamespace(size=4)
    shares: Any = SimpleNamespace(exchange=exchange, active=True, decide=decided.append)
    slot = StageSlot(last=3, shares=shares, inject_at=0, received=torch.zeros(1, 2, 3))
    stubs = [BlockStub(nn.Linear(3, 3), index, anatomy(), slot) for index in (0, 3)]
    x = torch.ones(1, 8, 3)
    assert stubs[0](x).shape == (1, 2, 3)
    assert decided == [8]
    assert stubs[1](slot.received).shape == (1, 8, 3)
    shares.active = False
    assert stubs[1](slot.received).shape == (1, 2, 3)


@pytest.mark.parametrize("before", [True, False])
def test_a_module_outside_the_blocks_gives_nan_in_its_shapes(before: bool) -> None:
    slot = StageSlot(last=3, shares=None)
    module = nn.Linear(3, 4).double().train()
    copy = meta_copy(module)
    assert {each.device.type for each in copy.parameters()} == {"meta"}
    assert not copy.training
    assert module.training
    stub = NanStub(module, copy, slot, before=before)
    assert isinstance(stub, Stub)
    x = torch.zeros(2, 3)
    found = stub(x)
    assert (found.shape, found.dtype, bool(found.isnan().all())) == ((2, 4), torch.float64, True)
    assert (found.stride() == (0, 0)) is not before
    slot.received = torch.zeros(1).bfloat16()
    assert stub(x).dtype == torch.bfloat16
    ids = NanStub(module, nn.Identity(), slot, before=before)(torch.ones(2, 3).long())
    assert (ids.dtype, ids.tolist()) == (torch.int64, [[0] * 3] * 2)


def staged(microbatches: int, calls: list[Any]) -> StagedForward:
    """One stage, the last: logits are the tokens of a row."""
    group: Any = SimpleNamespace(
        size=1, index=0, gather_integers=lambda mine: [mine], broadcast=lambda tensor, source, what: tensor
    )

    def run(schedule: PipelineSchedule, runner: StagedForward) -> None:
        for action in schedule.actions[0]:
            runner.run(action, ())

    def call(**batch: Any) -> Any:
        calls.append(batch)
        return SimpleNamespace(logits=batch["input_ids"].unsqueeze(-1).to(torch.bfloat16))

    stages: Any = SimpleNamespace(own=(0,), model=nn.Linear(1, 1), is_last=lambda chunk: True)
    stages.chunk = lambda *_, **__: nullcontext()
    schedule, executor = (make_schedule("forward", ranks=1, microbatches=microbatches), SimpleNamespace(group=group, run=run))
    return StagedForward(executor, stages, schedule, call)  # type: ignore[arg-type]


def test_prompts_are_generated_in_parts_of_rows() -> None:
    calls: list[Any] = []
    forward = staged(2, calls)
    ids, mask, cache = torch.arange(9).view(3, 3), torch.ones(3, 3), SimpleNamespace(name="cache")
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(3)[None], "past_key_values": cache}
    found = forward(inputs)
    assert (found.dtype, found.tolist()) == (torch.float32, [[[2.0]], [[5.0]], [[8.0]]])
    assert [len(each["input_ids"]) for each in calls] == [len(each["attention_mask"]) for each in calls] == [2, 1]
    assert [each["position_ids"].shape for each in calls] == [(1, 3)] * 2
    assert calls[0]["past_key_values"] is cache
    second = calls[1]["past_key_values"]
    assert second is not cache
    forward(inputs)
    assert calls[3]["past_key_values"] is second
    assert forward.signature(0) == ("tokens", (2, 3))
    assert forward.signature(1) == ("tokens", (1, 3))
    with pytest.raises(DataError, match="1 prompts cannot be generated in 2 microbatches"):
        forward({"input_ids": ids[:1]})
    with pytest.raises(LayoutError, match="Linear keeps something else than past_key_values"):
        forward({"input_ids": ids, "use_cache": True, "past_key_values": None})
    forward({"input_ids": ids, "past_key_values": None})
    assert "past_key_values" not in calls[-1]


class Tokens:
    """A batch of a row, whose next token is the number of tokens so far."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.entered = False

    def shape(self) -> tuple[int, int]:
        return (1, 1)

    def enter(self) -> None:
        self.entered = True

    def inputs(self) -> dict[str, Any]:
        return {"count": len(self.found)}

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.stack([logits[:, 0], torch.zeros(1)]).double()

    def append(self, chosen: torch.Tensor) -> None:
        self.found.append(float(chosen[0, 0]))


def test_batches_take_turns_and_wait_for_their_own_tokens() -> None:
    stages: Any = SimpleNamespace(own=(0,), is_last=lambda chunk: True, chunk=lambda *_, **__: nullcontext())
    group: Any = SimpleNamespace(size=1, broadcast_async=lambda tensor, source, what: lambda: None)
    batches = [Tokens(), Tokens()]
    runner = InterleavedBatches(stages, lambda count: SimpleNamespace(logits=torch.full((1, 2, 3), float(count))), batches, group)
    assert runner.signature(3) == ("turn", (1, 1))
    for action in make_schedule("forward", ranks=1, microbatches=6).actions[0]:
        runner.run(action, ())
    assert [each.found for each in batches] == [[0.0, 1.0]] * 2
    runner.finish()
    assert [each.found for each in batches] == [[0.0, 1.0, 2.0]] * 2
    assert not runner._inputs
    assert all(each.entered for each in batches)


def test_backwards_of_a_step_know_the_first_and_the_last_of_a_chunk() -> None:
    seen: list[tuple[str, bool, bool]] = []
    done: list[int] = []

    class Passes:
        def forward(self, chunk: int, run: Any, streams: Any, *, backward_follows: bool) -> Any:
            outputs = run()
            return outputs, SimpleNamespace(first=None, last=None, roots=[each for each in outputs if each.requires_grad])

        def backward(self, forward: Any, gradients: Any, *, inputs_only: bool = False) -> None:
            seen.append((str([float(each) for each in gradients]), forward.first, forward.last))

    work = [MicrobatchWork(batch={"x": number}, seed=0.5 + number) for number in range(3)]
    given: list[float] = []

    def loss(batch: Any, seed: float) -> torch.Tensor:
        given.append(seed)
        return torch.tensor(float(batch["x"]), requires_grad=batch["x"] != 1)

    passes: Any = Passes()
    runner = ZeroRunner(passes=passes, stages=None, work=work, loss=loss, queue=WeightQueue(), scale=4.0, after=done.append)
    for action in make_schedule("gpipe", ranks=1, microbatches=3).actions[0]:
        runner.run(action, ())
    assert given == [2.0, 6.0, 10.0]
    assert [float(each) for each in runner.losses] == [0.0, 1.0, 2.0]
    assert not any(each.requires_grad for each in runner.losses)
    assert seen == [("[2.0]", True, False), ("[]", False, False), ("[10.0]", False, True)]
    assert done == [0, 1, 2]
    assert not runner._forwards


@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 4), (3, 6)])
def test_an_evaluation_keeps_all_ranks_busy(ranks: int, count: int) -> None:
    driver = StepDriver.__new__(StepDriver)
    driver._ranks, driver._stages, driver._chunks, driver._measured = ranks, None, 1, None
    assert driver.evaluation_microbatches == count
    assert driver.is_last
    assert driver.timelines() is None
    driver._stages = SimpleNamespace(is_last=lambda chunk: chunk == 1)  # type: ignore[assignment]
    assert not driver.is_last
