"""A step's arrays in one copy: where they lie, and that no buffer is written to while something still reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioengine.worker.pipeline.staging import ALIGNMENT, Staging, plan_layout
from aioengine.worker.pipeline.transfers import Download, Event, HostTransfers


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_pieces_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    offsets, total = plan_layout(sizes)
    assert len(offsets) == len(sizes)
    assert all(offset % ALIGNMENT == 0 for offset in [*offsets, total])
    ends = [*offsets[1:], total]
    for offset, size, end in zip(offsets, sizes, ends, strict=True):
        assert offset + size <= end < offset + size + ALIGNMENT


def test_arrays_arrive_as_they_were() -> None:
    staging = Staging(HostTransfers())
    arrays: list[npt.NDArray[Any]] = [
        np.arange(7, dtype=np.int32),
        np.zeros((0, 4), dtype=np.int32),
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([2**63 - 1, -1], dtype=np.int64),
        np.arange(5, dtype=np.uint8)[::2],
    ]
    staged = staging.stage({"step": {str(i): array for i, array in enumerate(arrays)}})
    for array, tensor in zip(arrays, staged.groups["step"].values(), strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % ALIGNMENT == 0
    # The host's arrays may change at once.
    arrays[0][:] = -1
    assert staged.groups["step"]["0"].tolist() == list(range(7))


def test_nothing_to_send_is_fine() -> None:
    staged = Staging(HostTransfers()).stage({"step": {"a": np.zeros(0, dtype=np.int64)}})
    assert staged.groups["step"]["a"].shape == (0,)


def test_two_steps_may_wait_to_be_sampled_but_not_three() -> None:
    staging = Staging(HostTransfers())
    steps = [staging.stage({"step": {"a": np.full(3, i, dtype=np.int32)}}) for i in range(2)]
    assert [step.groups["step"]["a"].tolist() for step in steps] == [[0, 0, 0], [1, 1, 1]]
    with pytest.raises(RuntimeError, match="2 executed steps wait to be sampled"):
        staging.stage({"step": {"a": np.zeros(3, dtype=np.int32)}})


def test_a_large_step_gets_a_larger_buffer_and_later_ones_keep_it() -> None:
    transfers = LoggingTransfers()
    staging = Staging(transfers)
    large = np.arange(100_000, dtype=np.int64)
    staged = staging.stage({"step": {"a": large}})
    assert np.array_equal(staged.groups["step"]["a"].numpy(), large)
    staged.release()
    num_allocations = len(transfers.allocations)
    for _ in range(4):
        staging.stage({"step": {"a": large[:50_000]}}).release()
    assert len(transfers.allocations) == num_allocations + 1  # the other buffer


class LoggedEvent:
    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name

    def synchronize(self) -> None:
        self.log.append(f"wait for {self.name}")


class LoggingTransfers(HostTransfers):
    """Names its events by what came before them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.allocations: list[int] = []
        self.num_uploads = 0
        self.work = "nothing"  # what was enqueued last

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        self.allocations.append(num_bytes)
        return super().allocate_host(num_bytes)

    def mark(self) -> Event:
        return LoggedEvent(self.log, f"the end of {self.work}")

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event) -> Event:
        assert isinstance(after, LoggedEvent)
        self.num_uploads += 1
        self.log.append(f"upload {self.num_uploads} after {after.name}")
        device.copy_(host)
        return LoggedEvent(self.log, f"upload {self.num_uploads}")

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        raise AssertionError("staging only uploads")


def test_a_buffer_is_reused_only_after_its_copy_and_its_readers() -> None:
    transfers = LoggingTransfers()
    staging = Staging(transfers)
    for step in range(1, 5):
        staged = staging.stage({"step": {"a": np.full(3, step, dtype=np.int32)}})
        transfers.work = f"step {step}"
        staged.release()
    assert transfers.log == [
        "upload 1 after the end of nothing",
        "upload 2 after the end of nothing",  # beside step 1
        "wait for upload 1",  # before the host packs step 3 into the same pinned memory
        "upload 3 after the end of step 1",  # beside step 2
        "wait for upload 2",
        "upload 4 after the end of step 2",
    ]


@pytest.mark.parametrize("pipeline", ["device"], indirect=True)
def test_serving_allocates_no_staging_memory(make_driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory takes milliseconds to get: what the largest steps send is there from the start."""
    driver = make_driver(max_num_seqs=3, max_model_len=64, max_num_batched_tokens=64)

    def refuse(transfers: HostTransfers, num_bytes: int) -> torch.Tensor:
        raise AssertionError(f"{num_bytes} bytes more")

    monkeypatch.setattr(HostTransfers, "allocate_host", refuse)
    everything = {"top_p": 0.9, "temperature": 0.8, "logprobs": 20, "prompt_logprobs": 20, "repetition_penalty": 1.2, "min_tokens": 9}
    for i in range(3):
        driver.add(f"r{i}", [1 + (7 * i + j) % 50 for j in range(20)], bad_words_token_ids=((5,), (6, 7)), **everything)
    driver.step({f"r{i}": 20 for i in range(3)})
    for _ in range(6):
        driver.step({f"r{i}": 1 for i in range(3)})


def test_a_staging_says_how_much_it_holds_from_the_start() -> None:
    transfers = LoggingTransfers()
    staging = Staging(transfers, capacity=300_000)
    assert transfers.allocations == [1 << 19, 1 << 19]
    assert staging.capacity == 1 << 19
    staging.stage({"step": {"a": np.zeros(300_000, dtype=np.uint8)}}).release()
    assert len(transfers.allocations) == 2
