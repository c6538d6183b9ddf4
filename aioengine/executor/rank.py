"""The main program of a rank: a process with a part of the model, which does what the executor sends it.

    python -m aioengine.executor.rank FD       (by the multiproc executor; Ray calls `run_rank`)

The main thread only reads: it answers pings while the worker's thread is in a step, and it ends the process when the executor
is gone, whatever the worker does.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from aioengine.distributed.group import SINGLE_RANK, Group, join_group, open_store
from aioengine.executor.rank_messages import MEET, PING, PREPARE, RankStart, dump, fingerprint, load, portable
from aioengine.executor.uniproc import UniProcExecutor, WorkerProtocol
from aioengine.executor.worker_thread import WorkerThread
from aioengine.printable import get_logger

if TYPE_CHECKING:
    from aioengine.worker.worker import Worker


def main() -> None:
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    # Ctrl-C in a terminal, or a service manager, signals all processes at once; the executor decides when a rank ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run_rank(connection)


def run_rank(connection: Connection[Any, Any], *, make_worker: Callable[[], WorkerProtocol] | None = None) -> None:
    """Serve until the other end is closed; then the process ends at once, with whatever it is doing.

    make_worker: instead of the real one, which takes part in a group.
    """
    try:
        start: RankStart = load(connection.recv_bytes())
        rank = _Rank(connection, start, make_worker)
        while True:
            rank.take(*load(connection.recv_bytes()))
    except (EOFError, OSError):
        sys.stderr.flush()
        os._exit(0)


class _Rank:
    def __init__(self, connection: Connection[Any, Any], start: RankStart, make_worker: Callable[[], WorkerProtocol] | None) -> None:
        self._connection = connection
        self._has_group = start.size > 1 and make_worker is None
        self._start = start
        self._send_lock = threading.Lock()
        self._starter = WorkerThread("aioengine-rank-start")
        self._executor = UniProcExecutor(start.config, worker_factory=make_worker or self._create_worker)
        self._store: object = None  # of rank 0, kept for the others
        self._meeting_point = ("", 0)
        self._forward_log()

    def take(self, call_id: int, method: str, args: tuple[Any, ...]) -> None:
        """In the main thread, which waits for nothing but messages."""
        future: Future[Any]
        if method == PING:
            self._send((call_id, True, None))
            return
        if method == PREPARE:
            future = self._starter.submit(self._prepare)
        elif method == MEET:
            future = self._starter.submit(self._note_meeting_point, *args)
        elif method == "collective_rpc":
            future = self._executor.collective_rpc(_call_by_worker, args[0])
        else:
            future = getattr(self._executor, method)(*args)
        future.add_done_callback(partial(self._answer, call_id, method))

    def _prepare(self) -> int:
        """Import what takes seconds, before anybody counts them. Rank 0 opens the store; the others answer 0."""
        import aioengine.worker.worker  # noqa: F401

        if self._start.rank or not self._has_group:
            return 0
        self._store, port = open_store(self._start.host)
        return port

    def _note_meeting_point(self, host: str, port: int) -> None:
        self._meeting_point = host, port

    def _create_worker(self) -> Worker:
        from aioengine.worker.worker import Worker

        start = self._start
        return Worker(start.config, files=start.files, group=self._join() if self._has_group else SINGLE_RANK)

    def _join(self) -> Group:
        start, (host, port) = self._start, self._meeting_point
        return join_group(host, port, rank=start.rank, size=start.size, on_cuda=start.config.worker.device == "cuda")

    # ------------------------------------------------------------------ back
    def _answer(self, call_id: int, method: str, future: Future[Any]) -> None:
        """In the thread that did it."""
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._answer_error(call_id, error)
        elif self._start.rank == 0:
            self._send((call_id, True, future.result()))
        elif method == "sample_tokens":
            self._send((call_id, True, fingerprint(future.result())))
        elif method != "execute_model":  # rank 0 answers for all
            self._send((call_id, True, future.result()))

    def _answer_error(self, call_id: int, error: BaseException) -> None:
        where = f"in rank {self._start.rank} (process {os.getpid()})"
        self._send((call_id, False, portable(error, where=where)))

    def _send(self, message: object) -> None:
        data = dump(message)
        try:
            with self._send_lock:
                self._connection.send_bytes(data)
        except OSError:
            os._exit(0)  # nobody listens any more

    def _forward_log(self) -> None:
        """To the executor's process, whose handlers decide. All ranks see the same: what is no error, rank 0 tells."""
        logger = get_logger("aioengine")
        logger.setLevel(self._start.log_level if self._start.rank == 0 else max(self._start.log_level, logging.ERROR))
        logger.addHandler(_ForwardHandler(self._send))
        logger.propagate = False


def _call_by_worker(worker: Worker, data: bytes) -> Any:
    """In the worker's thread, as what is unpickled may import a lot."""
    method, args = load(data)
    return getattr(worker, method)(*args) if isinstance(method, str) else method(worker, *args)


class _ForwardHandler(logging.Handler):
    def __init__(self, send: Any) -> None:
        super().__init__()
        self._forward = send

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        self._forward((None, record.levelno, record.name, text))


if __name__ == "__main__":
    main()
