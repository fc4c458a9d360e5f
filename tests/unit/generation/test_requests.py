"""The inbox between threads and ranks: what it takes, passes on once, and hands back."""

import threading
import time

import pytest

from zeromesh.errors import PhaseError, QueueFullError
from zeromesh.trainer.generation.requests import Finish, Inbox, News, Progress, Request


def progress(number: int, finish: Finish | None = None) -> Progress:
    return Progress(number=number, tokens=[1], logprobs=None, finish=finish)


def test_news_is_passed_on_once() -> None:
    inbox = Inbox()
    inbox._news.streams = False
    for seed in (0, 4):
        inbox.submit([seed], print, fields={"top_k": 2} if seed else {}, seed=seed)
    inbox.cancel(1)
    inbox.cancel(7)
    first = [Request(number=0, tokens=[0]), Request(number=1, tokens=[4], fields={"top_k": 2}, seed=4)]
    assert inbox.take() == News(requests=first, cancelled=[1])
    assert inbox.take() == News()
    assert inbox.submit([5], print) == 2
    inbox.stop()
    assert inbox.take() == News(requests=[Request(number=2, tokens=[5])], stopping=True)
    assert inbox.take(wait_seconds=60) == News(stopping=True)
    streaming = Inbox()
    assert [streaming.take().streams for _ in range(2)] == [True, True]
    assert Inbox.of(first).take() == News(requests=first, stopping=True)


def test_a_limit_counts_open_requests() -> None:
    inbox, heard = Inbox(limit=2), list[Progress]()
    numbers = [inbox.submit([1], heard.append) for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests are open"):
        inbox.submit([1], heard.append)
    inbox.deliver([progress(0), progress(9)])
    assert (len(inbox), heard) == (2, [progress(0)])
    inbox.deliver([progress(1, "stop"), progress(1)])
    assert (len(inbox), heard[1:]) == (1, [progress(1, "stop")])
    inbox.cancel(1)
    assert numbers + [inbox.submit([1], heard.append)] == [0, 1, 2]
    assert inbox.take().cancelled == []


@pytest.mark.parametrize(("abandon", "cancelled"), [(False, []), (True, [0, 1])])
def test_a_stopped_inbox_takes_no_more(abandon: bool, cancelled: list[int]) -> None:
    inbox = Inbox(limit=2)
    for _ in range(2):
        inbox.submit([1], print)
    inbox.stop(abandon=abandon)
    assert (inbox.take().cancelled, len(inbox)) == (cancelled, 2)
    for call in (inbox.require_room, lambda: inbox.submit([1], print)):
        with pytest.raises(PhaseError, match="stopping and takes no more"):
            call()


def test_a_request_that_is_wrong_takes_no_place() -> None:
    inbox = Inbox(limit=1)
    with pytest.raises(TypeError, match="adaptor"):
        inbox.submit([1], print, adaptor="style")
    assert (len(inbox), inbox.take().requests) == (0, [])
    assert inbox.submit([1], print) == 0


@pytest.mark.parametrize("what", ["submit", "cancel", "stop"])
def test_whoever_waits_for_news_is_woken(what: str) -> None:
    inbox = Inbox()
    inbox.submit([1], print)
    inbox.take()
    news: list[News] = []
    waiter = threading.Thread(target=lambda: news.append(inbox.take(wait_seconds=20)))
    waiter.start()
    time.sleep(0.02)
    {"submit": lambda: inbox.submit([2], print), "cancel": lambda: inbox.cancel(0), "stop": inbox.stop}[what]()
    waiter.join(timeout=5)
    assert not waiter.is_alive()
    assert [len(news[0].requests), news[0].cancelled, news[0].stopping] == {
        "submit": [1, [], False], "cancel": [0, [0], False], "stop": [0, [], True]
    }[what]  # fmt: skip
    began = time.monotonic()
    assert Inbox().take(wait_seconds=0.02) == News(streams=True)
    assert time.monotonic() - began >= 0.01
