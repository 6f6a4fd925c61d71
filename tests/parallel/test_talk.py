"""What processes tell each other, and what they notice of each other: threads stand in for processes."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from skipless import parallel
from skipless.config import ParallelConfig
from skipless.errors import UserError
from skipless.parallel import LostRank, Ranks
from tests.parallel.crews import crews, gather


class Threads(Ranks):
    """One of several threads that share a store."""

    def __init__(self, rank, size, store, board, timeout):
        super().__init__(ParallelConfig(timeout=timeout), store, rank, size)
        self.board, self.barrier = board

    _all_gather = gather


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(parallel, "BEAT", 0.05)

    def make(size, timeout):
        store, board = dist.HashStore(), ({}, threading.Barrier(size))
        return [Threads(rank, size, store, board, timeout) for rank in range(size)]

    return make


def together(rank, work=lambda: None):
    with rank.together():
        work()


def test_what_takes_one_long_is_waited_for(ranks):
    first, second = ranks(2, timeout=0.3)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(together, first), pool.submit(together, second, lambda: time.sleep(1.5))]
    assert [job.exception() for job in jobs] == [None, None]


def test_one_that_gives_no_sign_of_life_is_named(ranks):
    first, _, third = ranks(3, timeout=0.3)  # the second never comes
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(together, one) for one in (first, third)]
    for job in jobs:
        assert isinstance(job.exception(), LostRank)
        assert "before the first step: rank 1 was lost" in str(job.exception())


def test_one_that_breaks_is_named_at_once(ranks):
    first, second = ranks(2, timeout=600)

    def work():
        raise ZeroDivisionError

    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(together, first), pool.submit(together, second, work)]
    assert "rank 1 was lost" in str(jobs[0].exception())
    assert isinstance(jobs[1].exception(), ZeroDivisionError)
    assert time.monotonic() - start < 60


def test_what_is_raised_in_one_is_raised_in_all():
    def work(crew):
        with crew.together():
            if crew.rank == 1:
                raise UserError("it is dark here")

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(work, crew) for crew in crews(3)]
    assert {str(job.exception()) for job in jobs} == {"rank 1: it is dark here"}


def test_a_signal_to_one_is_known_to_all():
    everyone = crews(3)
    everyone[2].received = 15
    assert [crew.signal for crew in everyone] == [0, 0, 0]
    with ThreadPoolExecutor(3) as pool:
        sums = list(pool.map(lambda crew: crew.sum(crew.rank, 0.5), everyone))
    assert sums == [[3.0, 1.5]] * 3
    assert [crew.signal for crew in everyone] == [15, 15, 15]
