"""What each dependency weighs: MB on disk, ms to import, and whether `aioengine generate` imports it.

    python benchmarks/install_weight.py

Imports are timed in fresh processes, the least of five; those of others than torch and numpy after these two, as in the
engine. "Alone" is what would go if the package were not asked for: itself and what nothing else that stays depends on.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

IMPORT_NAMES = {"pyyaml": "yaml", "prometheus-client": "prometheus_client", "huggingface-hub": "huggingface_hub"}
NUM_RUNS = 5
GENERATE = """
import json, sys
from aioengine.cli import main
main(["generate", "--raw", "--max-tokens", "4", "Hi"])
print()
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


def main() -> None:
    asked_for = direct_dependencies("aioengine")
    loaded = set(json.loads(run(GENERATE).splitlines()[-1]))
    print("| package | MB | alone, MB | import, ms | `generate` imports it |")
    print("| --- | ---: | ---: | ---: | --- |")
    for name in sorted(asked_for, key=lambda name: -size_mb({name})):
        module = IMPORT_NAMES.get(name, name)
        alone = closure(asked_for) - closure(asked_for - {name})
        print(
            f"| {name} | {size_mb({name}):.1f} | {size_mb(alone):.1f} | {import_ms(module):.0f} | {'yes' if module in loaded else 'no'} |"
        )
    print(f"| all of them, with what they depend on | {size_mb(closure(asked_for)):.0f} | | | |")


def direct_dependencies(name: str) -> set[str]:
    """Names of what the distribution depends on, extras and other systems left out."""
    try:
        lines = requires(name) or []
    except PackageNotFoundError:  # of another system
        return set()
    wanted = [line for line in lines if "extra ==" not in line and 'sys_platform == "win32"' not in line]
    return {normalized(match[0]) for line in wanted if (match := re.match(r"[A-Za-z0-9._-]+", line)) and is_installed(match[0])}


def closure(names: set[str]) -> set[str]:
    found: set[str] = set()
    todo = set(names)
    while todo:
        name = todo.pop()
        found.add(name)
        todo |= direct_dependencies(name) - found
    return found


def size_mb(names: set[str]) -> float:
    files = [Path(str(file.locate())) for name in names for file in distribution(name).files or []]
    return sum(path.stat().st_size for path in files if path.is_file()) / 1e6


def import_ms(module: str) -> float:
    before = "" if module in ("torch", "numpy") else "import numpy, torch; "
    code = f"{before}import time; start = time.perf_counter(); import {module}; print((time.perf_counter() - start) * 1e3)"
    return min(float(run(code)) for _ in range(NUM_RUNS))


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
