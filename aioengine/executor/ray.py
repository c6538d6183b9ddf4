"""Ranks wherever Ray places them: an actor each, in a placement group.

Ray does nothing but that. What is said to a rank goes over a TCP connection of its own, as an actor call costs more than a step's
messages; and sums go from rank to rank by torch.distributed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from aioengine.errors import ConfigError, RankLostError
from aioengine.executor.rank import run_rank
from aioengine.executor.rank_messages import RankStart, dump, load
from aioengine.executor.ranks import RanksExecutor, is_process_stopped, log_level
from aioengine.resolved_config import ResolvedConfig

if TYPE_CHECKING:
    from aioengine.checkpoint.files import ModelFiles

_PLACE_LIMIT_S = 60.0  # for Ray to find room
_CONNECT_LIMIT_S = 60.0  # for an actor to start and to call back
_SECRET_BYTES = 32
_PASSED_ON = ("GLOO_", "NCCL_", "TORCH_", "OMP_", "AIOENGINE_")  # how the names of variables begin that concern the ranks


def create_ray_executor(config: ResolvedConfig, *, files: ModelFiles) -> RanksExecutor:
    """An executor of `tensor_parallel_size` actors, which are placed with its first call. Raises ConfigError without Ray."""
    _import_ray()
    return RanksExecutor(config, RayRanks(files))


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as exc:
        raise ConfigError(
            f'distributed_executor_backend="ray" needs Ray, which cannot be imported here ({exc}): pip install "aioengine[ray]", '
            'or take distributed_executor_backend="multiproc" for ranks on this machine'
        ) from None
    return ray


class RayRanks:
    """Uses the cluster that the program, `ray start` or RAY_ADDRESS names; without one, Ray starts one on this machine."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._placement: Any = None
        self._has_started_ray = False
        self._ranks: list[RayRank] = []

    def launch(self, config: ResolvedConfig) -> Sequence[RayRank]:
        ray = _import_ray()
        if not ray.is_initialized():
            try:
                ray.init()
            except ConnectionError as exc:
                raise ConfigError(f"Ray cannot reach its cluster: {exc}") from exc
            self._has_started_ray = True
        try:
            return self._launch(ray, config)
        except BaseException:
            for rank in self._ranks:
                rank.kill()
            self.close()
            raise

    def close(self) -> None:
        import ray

        placement, self._placement = self._placement, None
        if placement is not None:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.util.remove_placement_group(placement)
        if self._has_started_ray:
            self._has_started_ray = False
            ray.shutdown()

    def _launch(self, ray: Any, config: ResolvedConfig) -> list[RayRank]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        size = config.parallel.tensor_parallel_size
        bundle = _bundle(config)
        self._placement = _place(ray, bundle, size)
        secret, host = secrets.token_bytes(_SECRET_BYTES), ray.util.get_node_ip_address()
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            address = (host, server.getsockname()[1])
            for rank in range(size):
                strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
                options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}
                actor = ray.remote(RankActor).options(**options, max_restarts=0, runtime_env={"env_vars": _environment()}).remote()
                self._ranks.append(RayRank(ray, actor, actor.run.remote(address, secret, rank), ours=host))
            _accept_all(server, secret, self._ranks)
        for rank, started in enumerate(self._ranks):
            start = RankStart(rank, size, started.host, _own_config(config), self._files, log_level())
            started.connection.send_bytes(dump(start))
        return self._ranks


class RankActor:
    """What Ray runs on a node."""

    def run(self, address: tuple[str, int], secret: bytes, rank: int) -> None:
        import ray

        sock = socket.create_connection(address, timeout=_CONNECT_LIMIT_S)
        sock.settimeout(None)
        connection: Connection[Any, Any] = Connection(sock.detach())
        challenge = connection.recv_bytes(_SECRET_BYTES)
        connection.send_bytes(_proof(secret, challenge))
        connection.send_bytes(dump((rank, os.getpid(), ray.util.get_node_ip_address())))
        run_rank(connection)


class RayRank:
    host = ""

    def __init__(self, ray: Any, actor: Any, running: Any, *, ours: str) -> None:
        self._ray, self._actor, self._running = ray, actor, running  # running: Ray's reference to what `run` returns
        self._ours = ours  # the address of this node
        self._pid = 0
        self._connection: Connection[Any, Any] | None = None

    def connect(self, connection: Connection[Any, Any], *, pid: int, host: str) -> None:
        self._connection, self._pid, self.host = connection, pid, host

    @property
    def connection(self) -> Connection[Any, Any]:
        assert self._connection is not None, "a rank that did not call back is not handed out"
        return self._connection

    @property
    def name(self) -> str:
        return f"process {self._pid} on {self.host}"

    def wait_for_end(self, limit_s: float) -> str | None:
        try:
            done, _ = self._ray.wait([self._running], timeout=limit_s)
            if not done:
                return None
            self._ray.get(self._running)
        except Exception as exc:  # of many classes, all of which say how the actor came to its end
            lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
            return f"ended: {lines[0]}" if lines else f"ended: {type(exc).__name__}"
        return "ended"

    def is_stopped(self) -> bool:
        return self.host == self._ours and is_process_stopped(self._pid)

    def kill(self) -> None:
        if self.host == self._ours and self._pid:  # Ray asks a process to end, which one that is stopped does not hear
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._ray.kill(self._actor)


def _bundle(config: ResolvedConfig) -> dict[str, float]:
    """What one rank takes of a node."""
    needs: dict[str, float] = {"CPU": config.worker.num_threads or 1}
    return {**needs, "GPU": 1} if config.worker.device == "cuda" else needs


def _place(ray: Any, bundle: dict[str, float], size: int) -> Any:
    """A placement group with a bundle a rank, on as few nodes as it goes. Raises ConfigError if there is no room."""
    wanted = f"{size} ranks of {_resources(bundle)} each"
    total = ray.cluster_resources()
    if any(total.get(name, 0) < size * amount for name, amount in bundle.items()):
        raise ConfigError(f"Ray has no room for {wanted}: the cluster has {_resources({name: total.get(name, 0) for name in bundle})}")
    placement = ray.util.placement_group([bundle] * size, strategy="PACK")
    if placement.wait(_PLACE_LIMIT_S):
        return placement
    free = ray.available_resources()
    ray.util.remove_placement_group(placement)
    raise ConfigError(
        f"Ray found no room for {wanted} within {_PLACE_LIMIT_S:g} s: "
        f"{_resources({name: free.get(name, 0) for name in bundle})} of the cluster are free, and a rank needs its share on one node"
    )


def _resources(amounts: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _accept_all(server: socket.socket, secret: bytes, ranks: Sequence[RayRank]) -> None:
    """Take the connections of all ranks. Who does not know the secret is sent away."""
    deadline = time.monotonic() + _CONNECT_LIMIT_S
    missing = set(range(len(ranks)))
    while missing:
        for rank in sorted(missing):
            if (how := ranks[rank].wait_for_end(0)) is not None:
                raise RankLostError(f"rank {rank} of {len(ranks)} {how}")
        if time.monotonic() > deadline:
            raise RankLostError(f"{_CONNECT_LIMIT_S:g} s after Ray had placed them, ranks {sorted(missing)} have not called back")
        server.settimeout(1.0)
        try:
            sock, _ = server.accept()
        except TimeoutError:
            continue
        found = _admit(sock, secret)
        if found is None:
            continue
        connection, (rank, pid, host) = found
        ranks[rank].connect(connection, pid=pid, host=host)
        missing.discard(rank)


def _admit(sock: socket.socket, secret: bytes) -> tuple[Connection[Any, Any], tuple[int, int, str]] | None:
    sock.settimeout(None)
    _limit_reading(sock, 5)
    connection: Connection[Any, Any] = Connection(os.dup(sock.fileno()))
    challenge = secrets.token_bytes(_SECRET_BYTES)
    try:
        connection.send_bytes(challenge)
        if hmac.compare_digest(connection.recv_bytes(_SECRET_BYTES), _proof(secret, challenge)):
            who: tuple[int, int, str] = load(connection.recv_bytes())  # nothing is unpickled before the proof
            _limit_reading(sock, 0)
            return connection, who
    except (OSError, EOFError):
        pass  # whatever it was, it was no rank
    finally:
        sock.close()
    connection.close()
    return None


def _limit_reading(sock: socket.socket, seconds: int) -> None:
    """0: no limit. In the kernel, as `Connection` reads from the descriptor."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _proof(secret: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, challenge, hashlib.sha256)


def _environment() -> dict[str, str]:
    """Of the actors: modules as they are found here, and what the user says to libraries about networks and threads."""
    passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    return {**passed, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


def _own_config(config: ResolvedConfig) -> ResolvedConfig:
    """As many threads as Ray counts CPUs for a rank; of GPUs a rank sees its own alone."""
    worker = config.worker
    if worker.device == "cuda":
        return replace(config, worker=replace(worker, device_index=0))
    return replace(config, worker=replace(worker, num_threads=worker.num_threads or 1))
