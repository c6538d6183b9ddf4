"""An executor whose worker is spread over processes: every call goes to all of them, rank 0 answers.

Where the processes come from is a `Launcher`'s business (`multiproc`, `ray`); here is what is said to them, and what is done when one
of them ends, fails alone, or hangs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.errors import EngineDeadError, RankLostError
from aioengine.executor.base import GrammarOutput
from aioengine.executor.rank_messages import MEET, PING, PREPARE, dump, dump_rpc, fingerprint, load
from aioengine.executor.worker_thread import WorkerThread
from aioengine.outputs import ModelRunnerOutput
from aioengine.printable import get_logger
from aioengine.resolved_config import ResolvedConfig

logger = get_logger(__name__)

_START_LIMIT_S = 120.0  # for a process to start and to import torch
_STOP_LIMIT_S = 5.0  # for a process to end when its connection is closed
_TICK_S = 1.0  # how often it is looked whether a rank hangs, while a call waits
_STOPPED_LIMIT_S = 6.0  # without an answer to a ping, from a process that the system says is stopped
_SILENT_LIMIT_S = 30.0  # the same from one of which nothing is known
_CAUSE_WAIT_S = 1.5  # for what broke a connection between ranks to show itself


class RankProcess(Protocol):
    """One rank, as its launcher holds it."""

    @property
    def connection(self) -> Connection[Any, Any]: ...

    @property
    def name(self) -> str:
        """For messages: "process 123"."""

    @property
    def host(self) -> str:
        """Where the other ranks reach it."""

    def wait_for_end(self, limit_s: float) -> str | None:
        """How it ended ("was killed by SIGKILL"); None if it still runs after that time."""

    def is_stopped(self) -> bool:
        """The system says that it is stopped, by SIGSTOP or a debugger. False where nobody knows."""

    def kill(self) -> None:
        """At once. Idempotent."""


class Launcher(Protocol):
    def launch(self, config: ResolvedConfig) -> Sequence[RankProcess]:
        """Start one process a rank, and send each its `RankStart`. Blocks. Raises ConfigError; then none is left."""

    def close(self) -> None:
        """Give back what was taken beside the processes. Idempotent."""


@dataclass(slots=True)
class _Call:
    method: str
    future: Future[Any]
    combine: Callable[[list[Any]], Any]  # of the answers, in the order of the ranks
    waits_for: set[int]
    answers: dict[int, Any] = field(default_factory=dict)


class RanksExecutor:
    """See `Executor` for the contract. The processes start with the first call."""

    def __init__(self, config: ResolvedConfig, launcher: Launcher) -> None:
        self._config = config
        self._launcher = launcher
        self._processes: Sequence[RankProcess] = ()
        self._sender = WorkerThread("aioengine-to-ranks")
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()  # guards what follows
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0
        self._failed_calls: set[int] = set()
        self._failure: BaseException | None = None
        self._suspicion: tuple[float, BaseException] | None = None  # a rank lost another: since when, and its error
        self._is_shut_down = False
        self._watch_sleeps = False
        self._heard: list[float] = []  # by rank, when its last message came
        self._pinged: list[float] = []  # by rank, when a ping was sent that is not answered; 0: there is none
        self._sending: tuple[int, float] | None = None  # to which rank, since when
        self._shutdown_lock = threading.Lock()

    def load_model(self) -> Future[None]:
        return self._call("load_model")

    def determine_num_kv_cache_blocks(self) -> Future[int]:
        return self._call("determine_num_kv_cache_blocks", combine=min)

    def initialize_kv_cache(self, num_blocks: int) -> Future[None]:
        return self._call("initialize_kv_cache", num_blocks)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        return self._call("execute_model", scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        args = () if grammar_output is None else (grammar_output,)
        return self._call("sample_tokens", *args, combine=_same_tokens)

    def collective_rpc(self, method: Callable[..., Any] | str, *args: Any) -> Future[list[Any]]:
        """A function must be one that the ranks can import."""
        try:
            data = dump_rpc(method, args)
        except TypeError as exc:
            future: Future[list[Any]] = Future()
            future.set_exception(exc)
            return future
        return self._call("collective_rpc", data, combine=lambda answers: [result for one in answers for result in one])

    def check_health(self) -> None:
        """Raise EngineDeadError after `shutdown()`, a failed step, or the loss of a rank."""
        if self._is_shut_down:
            raise EngineDeadError("the executor has been shut down")
        if self._failure is not None:
            raise EngineDeadError(f"{self._failure}") from self._failure

    def shutdown(self) -> None:
        """Cancel what is pending and end the processes, also in the middle of a step."""
        with self._shutdown_lock:
            with self._changed:
                if self._is_shut_down:
                    return
                self._is_shut_down = True
                calls, self._calls = list(self._calls.values()), {}
                self._changed.notify_all()
            for call in calls:
                call.future.cancel()
                call.future.set_running_or_notify_cancel()
            self._end_processes()
            self._sender.shutdown()
            self._end_processes()  # also those that it was about to start
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join()
            for process in self._processes:
                process.connection.close()
            self._launcher.close()

    # ------------------------------------------------------------------ to the ranks
    def _call(self, method: str, *args: Any, combine: Callable[[list[Any]], Any] = lambda answers: answers[0]) -> Future[Any]:
        future: Future[Any] = Future()
        size = self._config.parallel.tensor_parallel_size
        call = _Call(method, future, combine, {0} if method == "execute_model" else set(range(size)))
        with self._changed:
            error = EngineDeadError("the executor has been shut down") if self._is_shut_down else self._failure
            if error is None:
                self._num_calls += 1
                call_id = self._num_calls
                self._calls[call_id] = call
                if self._watch_sleeps:
                    self._changed.notify_all()
        if error is not None:
            future.set_exception(error)
            return future
        with contextlib.suppress(RuntimeError):  # it was shut down just now, which cancels the call
            self._sender.submit(self._send, call_id, method, args)
        return future

    def _send(self, call_id: int, method: str, args: tuple[Any, ...]) -> None:
        """In the sender's thread, which also starts the processes."""
        try:
            if not self._processes:
                self._start()
            data = dump((call_id, method, args))
        except BaseException as exc:
            self._fail_call(call_id, exc)
            return
        for rank in range(len(self._processes)):
            self._send_to(rank, data)

    def _send_to(self, rank: int, data: bytes) -> None:
        self._sending = rank, time.monotonic()
        with contextlib.suppress(OSError):  # it ended: the thread that reads from it will say so
            self._processes[rank].connection.send_bytes(data)
        self._sending = None

    def _start(self) -> None:
        processes = self._launcher.launch(self._config)
        now = time.monotonic()
        with self._changed:
            self._processes = processes
            self._heard, self._pinged = [now] * len(processes), [0.0] * len(processes)
            is_shut_down = self._is_shut_down
        if is_shut_down:
            return  # `shutdown` ends them when this thread has ended
        for rank, process in enumerate(processes):
            set_no_delay(process.connection)
            self._run_thread(self._receive, rank)
        port = max(self._ask(PREPARE))
        self._ask(MEET, processes[0].host, port)
        self._run_thread(self._watch)

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """A call before all others, in the sender's thread, which waits for it."""
        future: Future[list[Any]] = Future()
        with self._changed:
            if self._is_shut_down or self._failure is not None:  # whoever did that has not seen this call
                raise EngineDeadError("the executor was shut down while it started") from self._failure
            self._num_calls += 1
            call_id = self._num_calls
            self._calls[call_id] = _Call(method, future, lambda answers: answers, set(range(len(self._processes))))
        for rank in range(len(self._processes)):
            self._send_to(rank, dump((call_id, method, args)))
        try:
            return future.result(_START_LIMIT_S)
        except TimeoutError:
            late = sorted(self._calls[call_id].waits_for) if call_id in self._calls else []
            names = ", ".join(f"rank {rank} ({self._processes[rank].name})" for rank in late)
            error = RankLostError(f"{names} did not start within {_START_LIMIT_S:g} s")
            self._fail(error)
            raise error from None

    def _run_thread(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=f"aioengine-ranks-{target.__name__.strip('_')}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # ------------------------------------------------------------------ from the ranks, in a thread for each
    def _receive(self, rank: int) -> None:
        connection = self._processes[rank].connection
        while True:
            try:
                message = load(connection.recv_bytes())
            except (EOFError, OSError):
                break
            self._heard[rank] = time.monotonic()
            self._pinged[rank] = 0.0
            if message[0] is None:
                _, level, name, text = message
                get_logger(name).log(level, "%s", text if rank == 0 else f"rank {rank}: {text}")
            else:
                self._take_answer(rank, *message)
        if not self._is_shut_down and self._failure is None:
            process = self._processes[rank]
            how = process.wait_for_end(2.0) or "has closed its connection"
            self._fail(RankLostError(f"rank {rank} of {len(self._processes)} ({process.name}) {how}"))

    def _take_answer(self, rank: int, call_id: int, is_ok: bool, value: Any) -> None:
        if not is_ok:
            self._take_error(call_id, value)
            return
        with self._changed:
            call = self._calls.get(call_id)
            if call is None or rank not in call.waits_for:
                return
            call.waits_for.discard(rank)
            call.answers[rank] = value
            if call.waits_for:
                return
            del self._calls[call_id]
        try:
            result = call.combine([answer for _, answer in sorted(call.answers.items())])
        except RankLostError as exc:
            _set_exception(call.future, exc)
            self._fail(exc)
            return
        if call.future.set_running_or_notify_cancel():
            call.future.set_result(result)

    def _take_error(self, call_id: int, error: BaseException) -> None:
        """A rank failed. If because it lost another, or of an earlier failure, then the cause is somewhere else, and about to come."""
        if isinstance(error, (RankLostError, EngineDeadError)):
            with self._changed:
                if self._suspicion is None:
                    self._suspicion = time.monotonic(), error
                    self._changed.notify_all()
            return
        self._fail_call(call_id, error)

    def _fail_call(self, call_id: int, error: BaseException) -> None:
        with self._changed:
            if call_id in self._failed_calls:
                return  # another rank has said so
            self._failed_calls.add(call_id)
            call = self._calls.pop(call_id, None)
            calls = [] if call is None else [call]
            if call is None or call.method in ("execute_model", "sample_tokens"):
                # A step, to which rank 0 may have answered already: whatever waits now builds on it.
                self._failure = self._failure or error
                calls += self._calls.values()
                self._calls.clear()
        for each in calls:
            _set_exception(each.future, error)

    # ------------------------------------------------------------------ what goes wrong
    def _watch(self) -> None:
        """In a thread that sleeps while nothing is asked of the ranks."""
        while True:
            with self._changed:
                while not (self._calls or self._suspicion or self._is_shut_down):
                    self._watch_sleeps = True
                    self._changed.wait()
                    self._watch_sleeps = False
                if self._is_shut_down or self._failure is not None:
                    return
                self._changed.wait(_TICK_S)
                if self._is_shut_down or self._failure is not None:
                    return
                suspicion = self._suspicion
            now = time.monotonic()
            if suspicion is not None and now - suspicion[0] >= _CAUSE_WAIT_S:
                self._fail(suspicion[1])
                return
            lost = self._find_silent(now)
            if lost is not None:
                self._fail(lost)
                return

    def _find_silent(self, now: float) -> RankLostError | None:
        """A rank that does not answer; others that were silent for a while are asked whether they are there."""
        sending = self._sending
        for rank, process in enumerate(self._processes):
            since = self._pinged[rank]
            if sending is not None and sending[0] == rank and now - sending[1] > _TICK_S:
                since = sending[1]  # it does not even read
            if since:
                is_stopped = process.is_stopped()
                if now - since > (_STOPPED_LIMIT_S if is_stopped else _SILENT_LIMIT_S):
                    why = "it is stopped (SIGSTOP, or a debugger)" if is_stopped else "it hangs, or its machine does"
                    return RankLostError(
                        f"rank {rank} of {len(self._processes)} ({process.name}) has not answered for {now - since:.0f} s: {why}"
                    )
            elif now - self._heard[rank] > _TICK_S:
                with contextlib.suppress(RuntimeError):
                    self._sender.submit(self._ping, rank)
        return None

    def _ping(self, rank: int) -> None:
        if not self._pinged[rank]:
            self._pinged[rank] = time.monotonic()
            self._send_to(rank, dump((0, PING, ())))

    def _fail(self, error: BaseException) -> None:
        """No step can be taken any more. The processes end: nobody will use what they hold."""
        with self._changed:
            if self._is_shut_down or isinstance(self._failure, RankLostError):
                return
            self._failure = error
            calls, self._calls = list(self._calls.values()), {}
            self._changed.notify_all()
        logger.error("the executor ends: %s", error)
        for process in self._processes:
            process.kill()
        for call in calls:
            _set_exception(call.future, error)

    def _end_processes(self) -> None:
        """They end when their connection does, and if not, they are killed."""
        for process in self._processes:
            _shut_connection(process.connection)
        deadline = time.monotonic() + (_STOP_LIMIT_S if self._failure is None else 0.0)
        for process in self._processes:
            if process.wait_for_end(max(deadline - time.monotonic(), 0.0)) is None:
                process.kill()
                process.wait_for_end(_STOP_LIMIT_S)


def _same_tokens(answers: list[Any]) -> ModelRunnerOutput:
    """Rank 0's, if the others sampled the same."""
    output: ModelRunnerOutput = answers[0]
    expected = fingerprint(output) if len(answers) > 1 else 0
    for rank, found in enumerate(answers[1:], 1):
        if found != expected:
            raise RankLostError(
                f"rank {rank} sampled other tokens than rank 0: their results have come apart (different machines or kernels?)"
            )
    return output


def _set_exception(future: Future[Any], error: BaseException) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def set_no_delay(connection: Connection[Any, Any]) -> None:
    """A step is two small messages in a row: the second must not wait until the first is acknowledged."""
    with socket.socket(fileno=_duplicate(connection)) as sock:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _shut_connection(connection: Connection[Any, Any]) -> None:
    """Also wakes the thread that reads from it."""
    with contextlib.suppress(OSError), socket.socket(fileno=_duplicate(connection)) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def _duplicate(connection: Connection[Any, Any]) -> int:
    return os.dup(connection.fileno())


def is_process_stopped(pid: int) -> bool:
    """Of this machine, by SIGSTOP or a debugger. False where the system does not tell (it is no Linux)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


def log_level() -> int:
    """That of this process, for the ranks."""
    return get_logger("aioengine").getEffectiveLevel()
