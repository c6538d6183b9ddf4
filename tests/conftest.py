"""For all tests. What stands here runs before anything imports torch."""

from __future__ import annotations

import os

# OpenMP threads that spin while they wait make every test several times slower as soon as another process wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
