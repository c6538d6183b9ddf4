"""`aioengine serve`: the OpenAI-compatible server around one engine."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aioengine.commands.runtime import run, started_engine
from aioengine.commands.termination import drained_is_success
from aioengine.config import EngineConfig
from aioengine.engine.publish_options import PublishOptions
from aioengine.errors import ConfigError
from aioengine.server import ServerSettings, create_app
from aioengine.server.connection import ConnectionLimits
from aioengine.server.fake import ScriptedEngine
from aioengine.server.run import Server, bind
from aioengine.server.script import Script, read_script
from aioengine.server.tracing import OtelTracer

KEY_VARIABLE = "AIOENGINE_API_KEY"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """no_auth: answer another host than this machine without a key, which has to be said aloud. script: answer from it, without
    a model; None: load the model.
    """

    config: EngineConfig
    publish: PublishOptions
    host: str
    port: int
    api_key_file: str | None
    no_auth: bool
    served_model_names: Sequence[str]
    tool_call_parser: str | None
    allowed_origins: Sequence[str]
    max_connections: int
    log_requests: bool
    script: Script | None = None
    otlp_traces_endpoint: str | None = None


def serve(command: ServeCommand) -> None:
    """Serve until SIGINT or SIGTERM; the latter drains. Raises ConfigError."""
    settings = server_settings(command)
    limits = ConnectionLimits(max_connections=command.max_connections)
    run(_serve(command, settings, limits))


def server_settings(command: ServeCommand) -> ServerSettings:
    """Raises ConfigError for a key that cannot be read, and for a host that would let everybody in."""
    api_key = read_api_key(command.api_key_file)
    is_local = is_loopback(command.host)
    if api_key is None and not is_local and not command.no_auth:
        raise ConfigError(
            f"--host {command.host} can be reached from other machines: give a key by --api-key-file or {KEY_VARIABLE}, or say --no-auth"
        )
    return ServerSettings(
        served_model_names=command.served_model_names,
        api_key=api_key,
        # A foreign page can make a browser on this machine call it by a name of the page's own; such a name is not answered.
        allowed_hosts=_LOCAL_NAMES if is_local and api_key is None else (),
        tool_call_parser=command.tool_call_parser,
        allowed_origins=command.allowed_origins,
        log_requests=command.log_requests,
    )


def read_answers(file: str | None) -> Script:
    """Of --fake. Raises ConfigError."""
    return Script() if file is None else read_script(file)


def read_api_key(file: str | None) -> str | None:
    """From the file, else the environment. Never from the command line, which others on this machine can read."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the API key from {file}: {exc}") from exc
    if not key:
        raise ConfigError(f"the API key file {file} is empty")
    return key


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


async def _serve(command: ServeCommand, settings: ServerSettings, limits: ConnectionLimits) -> None:
    drained_is_success()
    name = (settings.served_model_names or (command.config.model,))[0]
    endpoint = command.otlp_traces_endpoint
    tracer = None if endpoint is None else OtelTracer.to_endpoint(endpoint, model_name=name)
    sockets = bind(command.host, command.port)  # before the model is loaded: that takes long
    try:
        make = None if command.script is None else partial(ScriptedEngine, script=command.script)
        async with started_engine(command.config, command.publish, make=make) as engine:
            app = create_app(engine, settings, tracer=tracer)
            server = Server(app, sockets, limits=limits)
            serving = asyncio.create_task(server.serve())
            try:
                await _until_listening(server, serving)
                print(_describe(command, settings, sockets[0].getsockname()[1]), file=sys.stderr, flush=True)
                await asyncio.wait([serving])  # it is not cancelled with us: first its answers end
            finally:
                await engine.shutdown()
                server.stop()
                await asyncio.wait([serving])
            serving.result()
    finally:
        for sock in sockets:
            sock.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.shutdown)


async def _until_listening(server: Server, serving: asyncio.Task[None]) -> None:
    while not server.is_listening and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)


def _describe(command: ServeCommand, settings: ServerSettings, port: int) -> str:
    name = (settings.served_model_names or (command.config.model,))[0]
    host = f"[{command.host}]" if ":" in command.host and not command.host.startswith("[") else command.host
    if settings.api_key is not None:
        who = "with an API key"
    elif is_loopback(command.host):
        who = "no API key, this machine only"
    else:
        who = "NO API KEY: whoever reaches this machine may use it"
    return f"serving {name} at http://{host}:{port}/v1 ({who})"
