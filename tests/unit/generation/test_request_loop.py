"""Requests are dealt out to the replica with the least to do, and go on until the inbox has stopped."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.trainer_cases import llama
from zeromesh.options import Placement
from zeromesh.trainer.generation.adapter_rows import AdapterRows
from zeromesh.trainer.generation.request_loop import RequestLoop
from zeromesh.trainer.generation.requests import Inbox, Progress, Request
from zeromesh.trainer.generation.settings import ModelSettings

Answer = Callable[[dict[str, Any]], list[dict[str, Any]]]


def loop_of(replicas: int, answer: Answer, *, rows: int, heard: list[Progress]) -> RequestLoop:
    """The loop of the first of some replicas, whose others answer each exchange with some progress."""

    exchanges = iter(range(100))

    def gather(message: dict[str, Any], what: str) -> list[dict[str, Any]]:
        assert next(exchanges, None) is not None, "requests do not end"
        return [message, *({"progress": answer(message)} for _ in range(replicas - 1))]

    one = SimpleNamespace(size=1)
    world = SimpleNamespace(gather_json=gather, all_reduce_max=lambda value, what: value)
    mesh = SimpleNamespace(
        world=world, data=SimpleNamespace(size=replicas), data_index=0, model_index=0, pipeline=one, tensor=one,
        device=torch.device("cpu"), environment=SimpleNamespace(local_world_size=1),
    )  # fmt: skip
    options = SimpleNamespace(
        precision=SimpleNamespace(compute=torch.float32), placements=SimpleNamespace(parameters=Placement.REPLICATED)
    )
    engine = SimpleNamespace(options=options, evaluation=nullcontext, lacks_parameters=False)
    model = llama().eval()
    placed: Any = SimpleNamespace(
        mesh=mesh, module=model, settings=ModelSettings(model, None), divided=SimpleNamespace(pipeline=None),
        require_engine=lambda: engine, adapters=AdapterRows(model),
    )  # fmt: skip
    return RequestLoop(placed, {"eos_token_id": -1, "max_new_tokens": 9}, rows=rows, on_progress=heard.extend)


def finished(number: int) -> dict[str, Any]:
    return {"number": number, "tokens": [1], "logprobs": [-1.0], "finish": "length"}


@pytest.mark.parametrize(
    ("streams", "rows", "costs", "own"),
    [
        (False, 8, [5, 20, 10, 12], {0, 1}),
        (True, 8, [5, 20, 10, 12], {0, 2, 3}),
        (True, 8, [9, 9, 9, 9], {0, 2}),
        # A replica gets a quarter more than it can run, and the rest when it has finished some.
        (True, 2, [5] * 8, {0, 2, 4, 6, 7}),
        (True, 4, [5] * 11, {0, 2, 4, 6, 8, 10}),
    ],
)
def test_requests_go_to_the_replica_with_the_fewest_open_tokens(streams: bool, rows: int, costs: list[int], own: set[int]) -> None:
    """`costs` are the tokens of each request, of which one is the prompt; the other replica finishes last."""
    inbox, heard, ended = Inbox(), list[Progress](), set[int]()
    inbox._news.streams = streams

    def answer(message: dict[str, Any]) -> list[dict[str, Any]]:
        ended.update(each["number"] for each in message["progress"] if each["finish"])
        rest = {*range(len(costs))} - own if ended >= own else set[int]()
        return [finished(number) for number in sorted(rest)]

    for cost in costs:
        inbox.submit([3], print, fields={"max_new_tokens": cost - 1})
    inbox.stop()
    loop = loop_of(2, answer, rows=rows, heard=heard)
    assert loop.run(inbox) == sum(costs[number] - 1 for number in own)
    lengths = [sum(len(each.tokens) for each in heard if each.number == number) for number in own]
    assert lengths == [costs[number] - 1 for number in own]
    assert {each.number for each in heard if each.finish == "length"} == {*range(len(costs))}


def test_a_request_that_waits_is_cancelled_and_fields_are_those_of_the_loop() -> None:
    requests = [Request(number=n, tokens=[3, 4], fields={} if n else {"max_new_tokens": 2}) for n in range(3)]
    inbox, heard = Inbox.of(requests), list[Progress]()
    inbox._news.cancelled.append(1)
    loop = loop_of(1, lambda message: [], rows=1, heard=heard)
    # Each prompt of two tokens, whose last one is computed with the first new one.
    assert loop.run(inbox) == (1 + 2) + (1 + 9)
    assert heard[0] == Progress(number=1, tokens=[], logprobs=[], finish="cancelled")
    ends = {each.number: each.finish for each in heard if each.finish}
    assert ends == {0: "length", 1: "cancelled", 2: "length"}
    assert sum(len(each.tokens) for each in heard) == 2 + 9


@pytest.mark.parametrize(("streams", "most"), [(True, 1), (False, 16)])
def test_tokens_are_told_at_once_where_somebody_reads_along(streams: bool, most: int) -> None:
    inbox, heard = Inbox(), list[Progress]()
    inbox._news.streams = streams
    inbox.submit([3], print, fields={"max_new_tokens": 20})
    inbox.stop()
    assert loop_of(1, lambda message: [], rows=4, heard=heard).run(inbox) == 20
    assert [len(each.tokens) for each in heard] == [most] * (20 // most) + [20 % most] * (most > 1)


def test_open_tokens_fall_as_tokens_are_made() -> None:
    """A request that comes when the first replica has fewer tokens left than the other, which has made none."""
    inbox, heard, own = Inbox(), list[Progress](), set[int]()
    for cost in (20, 15):
        inbox.submit([3], print, fields={"max_new_tokens": cost - 1})

    def answer(message: dict[str, Any]) -> list[dict[str, Any]]:
        own.update(each["number"] for each in message["progress"])
        if len(heard) == 10:
            inbox.submit([3], print, fields={"max_new_tokens": 2})
            inbox.stop()
        ended = sum(each.finish is not None for each in heard)
        return [finished(1)] if ended == 2 else []

    assert loop_of(2, answer, rows=4, heard=heard).run(inbox) == 19 + 2
    assert own == {0, 2}
