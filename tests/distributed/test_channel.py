"""What processes tell each other, and what they notice of each other: threads stand in for processes."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from skipless.config.run import ParallelConfig
from skipless.distributed import group
from skipless.distributed.group import LostRank, MultiProcessGroup
from skipless.errors import UserError
from skipless.storage.lock import InUse
from tests.helpers.thread_ranks import gather, thread_channels


class Threads(MultiProcessGroup):
    """One of several threads that share a store."""

    def __init__(self, rank, size, store, board, timeout):
        super().__init__(ParallelConfig(timeout=timeout), store, rank, size)
        self.board, self.barrier = board

    _all_gather = gather


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(group, "BEAT", 0.05)

    def make(size, timeout):
        store, board = dist.HashStore(), ({}, threading.Barrier(size))
        return [Threads(rank, size, store, board, timeout) for rank in range(size)]

    return make


def work_on(rank, work=lambda: None):
    with rank.raise_on_all_ranks():
        work()


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_takes_one_long_is_waited_for(ranks, monkeypatch):
    """Longer than the limit by a clock that goes on only when a sign of life was heard, however busy the machine is."""
    first, second = ranks(2, timeout=0.3)
    now, looks = 0.0, 0

    def clock():
        nonlocal looks
        looks += 1
        return now

    def work():
        nonlocal now
        for _ in range(5):
            beats = second._store.add("alive/1", 0)
            wait_until(lambda beats=beats: second._store.add("alive/1", 0) > beats)
            seen = looks
            wait_until(lambda seen=seen: looks > seen + 2)
            now += 0.2

    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(work_on, first), pool.submit(work_on, second, work)]
    assert [job.exception() for job in jobs] == [None, None]
    assert now > 3 * 0.3


def test_one_that_gives_no_sign_of_life_is_named(ranks):
    first, _, third = ranks(3, timeout=2)  # the second never comes
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(work_on, one) for one in (first, third)]
    for job in jobs:
        assert isinstance(job.exception(), LostRank)
        assert "before the first step: rank 1 was lost" in str(job.exception())


def test_one_that_breaks_is_named_at_once(ranks):
    first, second = ranks(2, timeout=600)

    def work():
        raise ZeroDivisionError

    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(work_on, first), pool.submit(work_on, second, work)]
    assert "rank 1 was lost" in str(jobs[0].exception())
    assert isinstance(jobs[1].exception(), ZeroDivisionError)
    assert time.monotonic() - start < 60


def test_what_is_raised_in_one_is_raised_in_all():
    def work(channel):
        with channel.raise_on_all_ranks():
            if channel.rank == 1:
                raise UserError("it is dark here")

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(work, channel) for channel in thread_channels(3)]
    assert {str(job.exception()) for job in jobs} == {"rank 1: it is dark here"}
    assert {job.exception().status for job in jobs} == {2}


def test_that_a_folder_is_in_use_is_known_to_all_by_the_exit_status(tmp_path):
    def work(channel):
        with channel.raise_on_all_ranks():
            if channel.is_main_process:
                raise InUse(tmp_path, 7)

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(work, channel) for channel in thread_channels(3)]
    assert {str(job.exception()) for job in jobs} == {str(InUse(tmp_path, 7))}
    assert {job.exception().status for job in jobs} == {InUse.status}


def test_a_signal_to_one_is_known_to_all():
    everyone = thread_channels(3)
    everyone[2].received = 15
    assert [channel.signal for channel in everyone] == [0, 0, 0]
    with ThreadPoolExecutor(3) as pool:
        sums = list(pool.map(lambda channel: channel.sum(channel.rank, 0.5), everyone))
    assert sums == [[3.0, 1.5]] * 3
    assert [channel.signal for channel in everyone] == [15, 15, 15]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 10])
def test_every_row_is_in_one_share(rows, size):
    """In the order of the ranks, also where rows do not divide evenly, or some ranks have none."""
    shares = [group.Group(None, rank, size).share(rows) for rank in range(size)]
    assert [row for start, end, _ in shares for row in range(start, end)] == list(range(rows))
    assert {most for _, _, most in shares} == {max(end - start for start, end, _ in shares)}
