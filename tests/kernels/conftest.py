from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent

# In a process that is in Triton's interpreter only the tests for it run (see interpreted/conftest.py).
collect_ignore = [path.name for path in HERE.glob("test_*.py")] if os.environ.get("TRITON_INTERPRET") == "1" else []
