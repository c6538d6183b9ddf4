"""What the executor makes of what its ranks say, with ranks that are played by this test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from multiprocessing.connection import Connection
from typing import Any

import pytest

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError, EngineDeadError, RankLostError
from aioengine.executor import ranks as ranks_module
from aioengine.executor.rank_messages import dump, fingerprint, load
from aioengine.executor.ranks import RanksExecutor
from aioengine.outputs import ModelRunnerOutput
from aioengine.resolved_config import ResolvedConfig
from aioengine.testing.builders import make_model_info

Answer = Callable[[str, tuple[Any, ...]], Any]  # what a rank says to a call; an exception is sent, None: (nothing) is an answer too
NOTHING = object()


def output(token_id: int = 5) -> ModelRunnerOutput:
    return ModelRunnerOutput(["a"], {"a": 0}, [[token_id]])


class PlayedRank:
    """Answers each call in a thread, as `answer` says, until its connection ends or it is killed."""

    host = "here"

    def __init__(self, rank: int, answer: Answer) -> None:
        ours, theirs = socket.socketpair()
        self.name = f"played {rank}"
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.theirs: Connection[Any, Any] = Connection(theirs.detach())
        self._answer = answer
        self._has_ended = threading.Event()
        self.how = "was killed by SIGKILL"
        threading.Thread(target=self._play, daemon=True).start()

    def _play(self) -> None:
        try:
            while True:
                call_id, method, args = load(self.theirs.recv_bytes())
                said = 0 if method in ("ping", "prepare", "meet") else self._answer(method, args)
                if isinstance(said, BaseException):
                    self.theirs.send_bytes(dump((call_id, False, said)))
                elif said is not NOTHING:
                    self.theirs.send_bytes(dump((call_id, True, said)))
        except (OSError, EOFError):
            self.end()

    def end(self) -> None:
        if not self._has_ended.is_set():
            self._has_ended.set()
            with socket.socket(fileno=self.theirs.fileno()) as sock:
                sock.shutdown(socket.SHUT_RDWR)
                sock.detach()

    def wait_for_end(self, limit_s: float) -> str | None:
        return self.how if self._has_ended.wait(limit_s) else None

    def is_stopped(self) -> bool:
        return False

    def kill(self) -> None:
        self.end()


class Players:
    def __init__(self, *answers: Answer) -> None:
        self._answers = answers
        self.ranks: list[PlayedRank] = []
        self.may_start = threading.Event()
        self.may_start.set()
        self.is_closed = False

    def launch(self, config: ResolvedConfig) -> Sequence[PlayedRank]:
        self.may_start.wait(10)
        self.ranks = [PlayedRank(rank, answer) for rank, answer in enumerate(self._answers)]
        return self.ranks

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[RanksExecutor, Players]]]:
    made: list[RanksExecutor] = []

    def start(*answers: Answer) -> tuple[RanksExecutor, Players]:
        config = EngineConfig(tensor_parallel_size=len(answers)).resolve(make_model_info(), cuda_available=False, free_memory_bytes=1 << 30)
        players = Players(*answers)
        made.append(RanksExecutor(config, players))
        return made[-1], players

    yield start
    for executor in made:
        executor.shutdown()


def says(**answers: Any) -> Answer:
    return lambda method, _: answers.get(method)


def test_the_blocks_are_the_fewest_and_the_tokens_rank_0s(start: Any) -> None:
    executor, _ = start(
        says(determine_num_kv_cache_blocks=9, sample_tokens=output()),
        says(determine_num_kv_cache_blocks=7, sample_tokens=fingerprint(output()), execute_model=NOTHING),
    )
    assert executor.determine_num_kv_cache_blocks().result(5) == 7
    assert executor.execute_model("step").result(5) is None
    assert executor.sample_tokens().result(5) == output()


def test_ranks_that_sample_different_tokens_end_it(start: Any) -> None:
    executor, _ = start(says(sample_tokens=output(5)), says(sample_tokens=fingerprint(output(6))))
    with pytest.raises(RankLostError, match="rank 1 sampled other tokens than rank 0"):
        executor.sample_tokens().result(5)
    with pytest.raises(EngineDeadError, match="rank 1 sampled"):
        executor.check_health()


def test_what_all_ranks_refuse_is_one_error_and_no_end(start: Any) -> None:
    refuses = says(determine_num_kv_cache_blocks=ConfigError("too small"), load_model=1)
    executor, _ = start(refuses, refuses)
    with pytest.raises(ConfigError, match="too small"):
        executor.determine_num_kv_cache_blocks().result(5)
    assert executor.load_model().result(5) == 1
    executor.check_health()


@pytest.mark.parametrize("rank_0_is", ["first", "last"])
def test_a_step_that_fails_in_rank_1_alone_fails_with_its_error(start: Any, rank_0_is: str) -> None:
    """Rank 0 waits in a sum of the forward, or has come through it."""

    def fails(method: str, _: object) -> Any:
        time.sleep(0.1)
        return ZeroDivisionError("alone") if method == "execute_model" else NOTHING

    executor, _ = start(says(execute_model=None if rank_0_is == "first" else NOTHING, sample_tokens=NOTHING), fails)
    executed, sampled = executor.execute_model("step"), executor.sample_tokens()
    with pytest.raises(ZeroDivisionError, match="alone"):
        sampled.result(5)
    assert executed.done()
    assert (executed.exception() is None) == (rank_0_is == "first")
    with pytest.raises(EngineDeadError, match="alone"):
        executor.check_health()


def test_a_rank_that_lost_another_is_not_the_cause(start: Any) -> None:
    lost = RankLostError("rank 0 could not sum with the other 1: connection reset")

    def dies(method: str, _: object) -> Any:
        if method == "execute_model":
            threading.Timer(0.3, players.ranks[1].end).start()
        return NOTHING

    executor, players = start(says(execute_model=lost), dies)
    with pytest.raises(RankLostError, match=r"rank 1 of 2 \(played 1\) was killed by SIGKILL"):
        executor.execute_model("step").result(5)


def test_a_lost_rank_that_never_shows_is_told_in_the_end(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_TICK_S", 0.05)
    monkeypatch.setattr(ranks_module, "_CAUSE_WAIT_S", 0.1)
    executor, _ = start(says(execute_model=RankLostError("rank 0 could not sum")), says(execute_model=NOTHING))
    with pytest.raises(RankLostError, match="rank 0 could not sum"):
        executor.execute_model("step").result(5)


def test_a_rank_that_does_not_answer_pings_is_named(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_TICK_S", 0.05)
    monkeypatch.setattr(ranks_module, "_SILENT_LIMIT_S", 0.3)

    def hangs(method: str, _: object) -> Any:
        time.sleep(2)
        return NOTHING

    executor, _ = start(says(), hangs)
    with pytest.raises(RankLostError, match=r"rank 1 of 2 \(played 1\) has not answered for 0 s: it hangs, or its machine does"):
        executor.load_model().result(5)


def test_shutdown_cancels_what_waits_and_ends_the_ranks(start: Any) -> None:
    executor, players = start(says(load_model=NOTHING), says())
    loading = executor.load_model()
    while not players.ranks:
        time.sleep(0.01)
    executor.shutdown()
    with pytest.raises(CancelledError):
        loading.result(5)
    assert [rank.wait_for_end(0) for rank in players.ranks] == ["was killed by SIGKILL"] * 2
    assert players.is_closed
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.load_model().result(5)


def test_shutdown_during_the_start_leaves_nobody(start: Any) -> None:
    executor, players = start(says(), says())
    players.may_start.clear()
    executor.load_model()
    threading.Timer(0.2, players.may_start.set).start()
    begun = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - begun < 5
    assert [rank.wait_for_end(1) for rank in players.ranks] == ["was killed by SIGKILL"] * 2


def test_a_function_that_ranks_cannot_import_is_refused(start: Any) -> None:
    executor, _ = start(says())
    with pytest.raises(TypeError, match="must stand in a module by name"):
        executor.collective_rpc(lambda worker: 1).result(5)
    executor.check_health()
