"""Memory that is handed out again once nobody looks at it."""

from __future__ import annotations

import pytest
import torch

from aioengine_kernels.cpu import CpuKernels
from aioengine_kernels.cpu.packing import pack_dense
from aioengine_kernels.cpu.reused_memory import ReusedMemory


def test_the_same_memory_comes_again_once_it_is_let_go() -> None:
    memory = ReusedMemory()
    first = memory.take(3, 5)
    address = first.data_ptr()
    del first
    assert memory.take(2, 7).data_ptr() == address


@pytest.mark.parametrize(
    "keep", [lambda x: x, lambda x: x[1:, 2], lambda x: x.numpy(), lambda x: x.numpy()[:, 1], lambda x: x.view(-1).detach()]
)
def test_what_somebody_holds_is_left_to_them(keep: object) -> None:
    assert callable(keep)
    memory = ReusedMemory()
    held = keep(memory.take(3, 4).fill_(1.0))
    again = memory.take(3, 4).fill_(2.0)
    assert (held == 1.0).all()
    assert (again == 2.0).all()


def test_it_grows_with_what_is_asked_for() -> None:
    memory = ReusedMemory()
    assert memory.take(0, 4).shape == (0, 4)
    small = memory.take(2, 4).fill_(1.0)
    large = memory.take(40, 4).fill_(2.0)
    assert small.sum() == 8
    assert large.sum() == 320


def test_a_product_is_written_where_it_is_told_to(kernels: CpuKernels) -> None:
    weight, x = torch.eye(8), torch.arange(16.0).view(2, 8)
    out = torch.empty(2, 8)
    assert kernels.linear(x, pack_dense(weight), out=out) is out
    assert torch.equal(out, x)
    with pytest.raises(ValueError, match=r"out must be contiguous float32 \[2, 8\], got torch.float32 \[3, 8\]"):
        kernels.linear(x, pack_dense(weight), out=torch.empty(3, 8))
