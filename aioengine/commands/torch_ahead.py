"""Opens PyTorch's library while Python imports the rest: a fifth of `import torch` is the system's loader, which needs no GIL."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path

_LIBRARY = Path("lib") / "libtorch_cpu.so"


def open_torch_ahead() -> None:
    """Begin, in a thread; `import torch` waits for what is still missing. Does nothing where it cannot be: the import says why.

    Through the C function: `ctypes.CDLL` keeps the GIL while the loader works, as importing an extension does.
    """
    spec = importlib.util.find_spec("torch") if sys.platform == "linux" and "torch" not in sys.modules else None
    if spec is None or spec.origin is None or not (path := Path(spec.origin).parent / _LIBRARY).is_file():
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read by OpenMP when it is loaded: see `startup`
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    # No daemon: a process that ends now (a wrong setting) does so when the library has been loaded, not in the middle.
    threading.Thread(target=dlopen, args=(os.fsencode(path), os.RTLD_LAZY | os.RTLD_LOCAL), name="aioengine-open-torch").start()
