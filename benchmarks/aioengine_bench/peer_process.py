"""A runner as this side sees it: a child process, one line of JSON each way. See `benchmarks/peers/protocol.py`."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from aioengine.errors import AioEngineError
from aioengine_bench.timeline import RequestRecord
from aioengine_bench.workloads import WorkloadRequest


class PeerFailedError(AioEngineError):
    """A runner ended, or said something that is no answer; the message has the end of what it wrote to stderr."""


class PeerProcess:
    """One engine in its own process. Raises PeerFailedError; a context manager that ends it."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self.peak_rss_mb: float | None = None
        self.num_unseen_tokens = 0  # of all turns: counted by the engine, and never sent
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log)

    def start(self, settings: dict[str, Any]) -> None:
        """Load the model; returns when the engine answers."""
        self.facts = self._ask(settings)

    def run(self, requests: Sequence[WorkloadRequest]) -> tuple[float, list[RequestRecord], list[list[int]] | None]:
        """All requests at once: seconds of wall clock, one record a request, their tokens (None: it does not tell them)."""
        message = {"requests": [{"prompt": request.prompt_token_ids, "max_tokens": request.max_tokens} for request in requests]}
        answer = self._ask(message)
        self.peak_rss_mb = answer["peak_rss_mb"]
        self.num_unseen_tokens += sum(answer["unseen"])
        records = [
            RequestRecord(
                index=index,
                prompt_len=len(request.prompt_token_ids),
                due_time=0.0,
                send_time=0.0,
                chunk_times=tuple(seconds for seconds, _ in chunks),
                chunk_sizes=tuple(size for _, size in chunks),
                outcome="failed" if (lost := error or _shortfall(chunks, request)) else "completed",
                error=lost,
            )
            for index, (request, chunks, error) in enumerate(zip(requests, answer["chunks"], answer["errors"], strict=True))
        ]
        return float(answer["wall_s"]), records, answer["token_ids"]

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(orjson.dumps(message) + b"\n")
            process.stdin.flush()
            answer = orjson.loads(process.stdout.readline() or b"null")
        except (BrokenPipeError, orjson.JSONDecodeError) as exc:
            raise PeerFailedError(f"{self.name}: {exc}\n{self._log_end()}") from exc
        if not isinstance(answer, dict):
            raise PeerFailedError(f"{self.name} ended with status {process.wait()}\n{self._log_end()}")
        return answer

    def _log_end(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-12:])

    def close(self) -> None:
        """End the process: first by asking, and after some seconds by force."""
        process = self._process
        with contextlib.suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _shortfall(chunks: Sequence[tuple[float, int]], request: WorkloadRequest) -> str:
    num_tokens = sum(size for _, size in chunks)
    return "" if num_tokens == request.max_tokens else f"{num_tokens} tokens in place of {request.max_tokens}"


def float32_folder(model: str, peers_dir: Path) -> tuple[Path, str | None]:
    """A folder of safetensors in float32 that every engine reads, made from the GGUF once; and the GGUF file itself.

    For a model that is safetensors already: its own folder, and None.
    """
    import torch

    from aioengine.checkpoint.gguf import GGUFFile
    from aioengine.models.info import resolve_model

    files = resolve_model(model)
    if files.format != "gguf":
        return files.folder, None
    target = peers_dir / "models" / f"{files.weights[0].stem}-float32"
    if not (target / "model.safetensors").exists():
        from safetensors.torch import save_file

        tensors: dict[str, torch.Tensor] = {}
        for path in files.weights:
            for tensor in GGUFFile(path).tensors():
                tensors[tensor.name] = torch.empty(tensor.shape)
                tensor.read_into(tensors[tensor.name])
        target.mkdir(parents=True, exist_ok=True)
        for path in files.folder.iterdir():
            if path.suffix in (".json", ".jinja"):
                (target / path.name).write_bytes(path.read_bytes())
        config = orjson.loads((files.folder / "config.json").read_bytes()) | {"dtype": "float32"}
        config.setdefault("architectures", ["LlamaForCausalLM"])
        (target / "config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
        save_file(tensors, target / "model.safetensors.partial", metadata={"format": "pt"})
        (target / "model.safetensors.partial").replace(target / "model.safetensors")
    return target, str(files.weights[0])
