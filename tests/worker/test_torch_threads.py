"""How many threads PyTorch uses: a setting of one worker, and of nobody else."""

from __future__ import annotations

import threading

import torch

from aioengine.worker.device import limit_torch_threads


def in_a_thread(limit: int | None) -> int:
    """What PyTorch uses in a new thread, after it limited itself there."""
    seen: list[int] = []

    def run() -> None:
        if limit is not None:
            limit_torch_threads(limit)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen[0]


def test_a_worker_that_limits_itself_limits_no_other_thread() -> None:
    before = torch.get_num_threads()
    other = before + 1
    assert in_a_thread(other) == other
    assert torch.get_num_threads() == before
    assert in_a_thread(None) == before  # one that starts later: another engine's worker, the program around this one
