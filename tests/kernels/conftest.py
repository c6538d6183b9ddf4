from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent

# Triton's interpreter is chosen when triton is first imported, so its tests run in a process of their own, which
# test_interpreter.py starts; in that process only they run.
collect_ignore = [path.name for path in HERE.glob("test_*.py")] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
