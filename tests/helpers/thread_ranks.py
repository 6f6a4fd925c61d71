"""Threads that talk to each other as processes do."""

import threading

from skipless.distributed.channel import Channel


def gather(self, tensor):
    """What `Channel` asks of PyTorch, over a board that all threads see."""
    self.board[self.rank] = tensor
    self.barrier.wait(600)
    found = [self.board[rank].clone() for rank in range(self.size)]
    self.barrier.wait(600)
    return found


class ThreadChannel(Channel):
    """The channel of one of several threads."""

    def __init__(self, rank, size, board):
        super().__init__(rank, size)
        self.board, self.barrier = board

    _all_gather = gather


def thread_channels(size):
    board = ({}, threading.Barrier(size))
    return [ThreadChannel(rank, size, board) for rank in range(size)]
