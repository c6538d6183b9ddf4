"""`aioengine doctor`: what this machine offers the engine, why something is slow or missing, and which path a model takes."""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from aioengine.checks.cores import format_cores, usable_cores
from aioengine.printable import printable


def doctor(model: str | None = None) -> bool:
    """Print one line a finding; True if the fast paths of this machine are all there, and the model, if one is named, can be served."""
    import torch

    from aioengine.checkpoint.cache import cache_folder
    from aioengine.config import default_kv_cache_bytes
    from aioengine.engine.startup import free_memory_bytes
    from aioengine_kernels import cpu

    print(f"{'python':<14}{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    usable = usable_cores()
    print(f"{'cores':<14}{'unknown here' if usable is None else f'{format_cores(usable)} may be used (num_threads, cpu_affinity)'}")
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
    compiles = _report_compiler(has_gpu=torch.cuda.is_available())
    free = free_memory_bytes()
    kv_bytes = default_kv_cache_bytes(free)
    print(
        f"{'kv cache':<14}{kv_bytes / 2**30:.2f} GiB on the CPU, of {free / 2**30:.1f} GiB free (kv_cache_memory_bytes); "
        "where max_model_len is auto, what that holds limits it"
    )
    print(f"{'model cache':<14}{printable(str(cache_folder()))}")
    served = model is None or _report_model(model, free_memory_bytes=free)
    return served and (compiles if torch.cuda.is_available() else reason is None)


def _report_model(name: str, *, free_memory_bytes: int) -> bool:
    """What its small files say, and which code will run it; False if none can. Nothing is fetched."""
    import torch

    from aioengine.config import EngineConfig
    from aioengine.errors import AioEngineError
    from aioengine.models.info import read_model_info, resolve_model
    from aioengine.models.path import find_path

    try:
        files = resolve_model(name, allow_download=False)
        info = read_model_info(files)
        config = EngineConfig(model=name).resolve(info, cuda_available=torch.cuda.is_available(), free_memory_bytes=free_memory_bytes)
        path = find_path(files, config)
    except AioEngineError as error:
        print(printable(f"{'model':<14}cannot be served: {error}"))
        return False
    print(
        printable(
            f"{'model':<14}{info.architecture}, {files.format}: {info.num_layers} layers, {info.num_heads} query and {info.num_kv_heads} "
            f"key/value heads of {info.head_dim}, texts of up to {info.max_position_embeddings} tokens"
        )
    )
    print(printable(f"{'path':<14}{path.kind}: {path.reason}"))
    return True


def _report_compiler(*, has_gpu: bool) -> bool:
    """Triton builds the C code that launches a kernel when it first launches one; False if it could not."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [] if compiler else ["a C compiler (gcc, or the one that CC names)"]
    missing += [] if header.is_file() else [f"Python's headers ({header})"]
    if not missing:
        print(f"{'c compiler':<14}{compiler}")
    elif has_gpu:
        print(f"{'c compiler':<14}missing: Triton's first launch on the GPU needs {' and '.join(missing)}")
    else:
        print(f"{'c compiler':<14}not complete, which only a GPU needs: no {' and '.join(missing)}")
    return not missing


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
