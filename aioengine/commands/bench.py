"""`aioengine bench`: hands the benchmarks what they need of the command line. They are in the package `aioengine_bench`."""

from __future__ import annotations

import argparse
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from aioengine.commands import options
from aioengine_bench import arguments
from aioengine_bench.host import Host

if TYPE_CHECKING:
    from aioengine.config import EngineConfig
    from aioengine.engine.async_engine import AsyncEngine
    from aioengine.engine.publish_options import PublishOptions


def add_bench(commands: Any) -> None:
    """Add the command `bench` with its subcommands."""
    parser = commands.add_parser(
        "bench",
        help="measure throughput, latency, serving, kernels, and the engine's own cost",
        description="Measure throughput, latency, serving, kernels, and the engine's own cost.",
        usage="aioengine bench COMMAND ...",
        epilog=arguments.EPILOG,
    )
    host = Host(
        add_engine_options=_add_engine_options,
        add_model_option=options.add_model_option,
        add_log_option=options.add_log_option,
        engine_config=options.engine_config,
        publish_options=options.publish_options,
        run=_run,
        started_engine=_started_engine,
    )
    arguments.add_subcommands(parser, host)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    options.add_model_option(parser)
    options.add_run_options(parser)
    options.add_engine_options(parser)


def _run(main: Coroutine[Any, Any, bool]) -> None:
    from aioengine.commands.runtime import run

    if run(main):
        raise KeyboardInterrupt


def _started_engine(config: EngineConfig, publish: PublishOptions) -> AbstractAsyncContextManager[AsyncEngine]:
    from aioengine.commands.runtime import started_engine

    return started_engine(config, publish)
