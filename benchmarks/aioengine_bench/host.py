"""What the benchmarks take from the command that starts them: options of an engine, an event loop, an engine that runs.

The command line hands this in. So the package imports nothing above it, and a test hands in an engine without a model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioengine.config import EngineConfig
    from aioengine.engine.async_engine import AsyncEngine
    from aioengine.engine.publish_options import PublishOptions


@dataclass(frozen=True, slots=True)
class Host:
    add_engine_options: Callable[[argparse.ArgumentParser], None]  # the model, its events and logs, every engine setting
    add_model_option: Callable[[argparse.ArgumentParser], None]
    add_log_option: Callable[[argparse.ArgumentParser], None]
    engine_config: Callable[[argparse.Namespace], EngineConfig]
    publish_options: Callable[[argparse.Namespace], PublishOptions]
    run: Callable[[Coroutine[Any, Any, bool]], None]
    """Runs a benchmark. Ctrl-C cancels it; it saves what it has and returns True, upon which this raises KeyboardInterrupt."""
    started_engine: Callable[[EngineConfig, PublishOptions], AbstractAsyncContextManager[AsyncEngine]]
    """(configuration, where its events go) -> a running engine, shut down at the end of the block."""
