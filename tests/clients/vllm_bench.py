"""`vllm bench serve`, whose console script would ask for a package of another name."""

from __future__ import annotations

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
result = main(parser.parse_args())
if result and result.get("failed"):
    raise SystemExit(f"{result['failed']} requests failed")
