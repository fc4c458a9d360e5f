"""Sleeping until a word changes: it ends when the word is written, and does not begin when it has been."""

import mmap
import threading
import time

import pytest

from zeromesh.comm.shm_transport import Futex


@pytest.fixture
def words() -> memoryview:
    return memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")


def test_a_sleeper_is_woken_by_the_write(words: memoryview) -> None:
    words[3] = 2**32 + 7  # The upper half is not looked at.
    here, there = Futex(words, 3), Futex(words, 3)

    def write() -> None:
        time.sleep(0.05)
        words[3] = 2**32 + 8
        there.wake()

    thread = threading.Thread(target=write)
    began = time.perf_counter()
    thread.start()
    while words[3] == 2**32 + 7:
        here.wait(2**32 + 7, 0.9)
    seconds = time.perf_counter() - began
    thread.join()
    assert 0.04 < seconds < 0.85, "it slept to the end of its time"


def test_nobody_sleeps_for_what_has_been_written(words: memoryview) -> None:
    words[0] = 5
    began = time.perf_counter()
    Futex(words, 0).wait(4, 0.9)
    assert time.perf_counter() - began < 0.8


def test_sleep_ends_without_a_write(words: memoryview) -> None:
    began = time.perf_counter()
    Futex(words, 0).wait(0, 0.02)
    assert time.perf_counter() - began > 0.01
