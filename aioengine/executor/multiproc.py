"""Ranks as processes of this machine, each with a socket pair to the executor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from aioengine.errors import ConfigError
from aioengine.executor.rank_messages import RankStart, dump
from aioengine.executor.ranks import RanksExecutor, is_process_stopped, log_level
from aioengine.resolved_config import ResolvedConfig

if TYPE_CHECKING:
    from aioengine.checkpoint.files import ModelFiles

_HOST = "127.0.0.1"


def create_multiproc_executor(config: ResolvedConfig, *, files: ModelFiles) -> RanksExecutor:
    """An executor of `tensor_parallel_size` processes, which start with its first call."""
    if sys.platform == "win32":
        raise ConfigError('distributed_executor_backend="multiproc" hands socket pairs to processes, which Windows does not have')
    return RanksExecutor(config, LocalRanks(files))


class LocalRanks:
    """program: the module that a rank runs."""

    def __init__(self, files: ModelFiles, *, program: str = "aioengine.executor.rank") -> None:
        self._files = files
        self._program = program

    def launch(self, config: ResolvedConfig) -> Sequence[LocalRank]:
        size = config.parallel.tensor_parallel_size
        started: list[LocalRank] = []
        try:
            for rank in range(size):
                process = _start_process(self._program)
                started.append(process)
                start = RankStart(rank, size, _HOST, _own_config(config, rank), self._files, log_level())
                process.connection.send_bytes(dump(start))
        except BaseException:
            for process in started:
                process.kill()
            raise
        return started

    def close(self) -> None:
        """Nothing but the processes was taken: no port, no file, no shared memory."""


class LocalRank:
    host = _HOST

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection[Any, Any]) -> None:
        self._process = process
        self.connection = connection

    @property
    def name(self) -> str:
        return f"process {self._process.pid}"

    def wait_for_end(self, limit_s: float) -> str | None:
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        if code >= 0:
            return f"ended with exit code {code}"
        hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def is_stopped(self) -> bool:
        return is_process_stopped(self._process.pid)

    def kill(self) -> None:
        self._process.kill()


def _start_process(program: str) -> LocalRank:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            # -P: what lies in the current folder is no module of ours.
            [sys.executable, "-P", "-m", program, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output is the program's: text, JSON, a picture
            env=_environment(),
        )
        return LocalRank(process, Connection(ours.detach()))


def _environment() -> dict[str, str]:
    """What can be imported here can be there (logits processors are named by module); sums go round this machine only."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": loopback, **os.environ, "PYTHONPATH": path}


def _own_config(config: ResolvedConfig, rank: int) -> ResolvedConfig:
    """The ranks share the cores; of several GPUs each takes its own."""
    worker, size = config.worker, config.parallel.tensor_parallel_size
    if worker.device == "cuda":
        return replace(config, worker=replace(worker, device_index=(worker.device_index or 0) + rank))
    if worker.num_threads is None and size > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return replace(config, worker=replace(worker, num_threads=max(cores // size, 1)))
    return config
