"""`aioengine doctor`: what this machine offers the engine, and why something is slow or missing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from aioengine.printable import printable


def doctor() -> bool:
    """Print one line a finding; True if the fast paths of this machine are all there."""
    import torch

    from aioengine.models.hub import cache_folder
    from aioengine_kernels import cpu

    print(f"{'python':<14}{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    for package in ("aioengine", "torch", "transformers", "tokenizers", "triton", "textual", "uvloop"):
        print(f"{package:<14}{_version(package)}")
    reason = cpu.status()
    if reason is None:
        print(f"{'cpu kernels':<14}ready: {', '.join(cpu.supported_isas())}; {_used_isa()}")
    else:
        print(f"{'cpu kernels':<14}missing, models run several times slower on PyTorch's kernels: {reason}")
    if torch.cuda.is_available():
        print(f"{'cuda':<14}{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB")
    else:
        print(f"{'cuda':<14}none that PyTorch {torch.__version__} can use")
    print(f"{'model cache':<14}{printable(str(cache_folder()))}")
    return reason is None or torch.cuda.is_available()


def _used_isa() -> str:
    from aioengine_kernels.cpu.library import ISA_VARIABLE, choose_isa

    try:
        used = choose_isa()
    except ValueError as error:
        return f"{ISA_VARIABLE} is wrong: {error}"
    return f"{used} is used" + (f", as {ISA_VARIABLE} says" if os.environ.get(ISA_VARIABLE) else "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
