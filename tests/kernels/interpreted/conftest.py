"""Runs in a process that set TRITON_INTERPRET=1 (see ../test_interpreter.py): every kernel on NumPy, against float64."""

from __future__ import annotations

from aioengine_kernels import interpreter

interpreter.install()
