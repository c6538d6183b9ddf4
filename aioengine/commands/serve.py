"""`aioengine serve`: the OpenAI-compatible server around one engine."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aioengine.commands.runtime import run, started_engine
from aioengine.config import EngineConfig
from aioengine.engine.publishing import PublishOptions
from aioengine.errors import ConfigError
from aioengine.server import ServerSettings, create_app
from aioengine.server.run import serve_app

KEY_VARIABLE = "AIOENGINE_API_KEY"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """no_auth: answer another host than this machine without a key, which has to be said aloud."""

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


def serve(command: ServeCommand) -> None:
    """Serve until SIGINT or SIGTERM; the latter drains. Raises ConfigError."""
    settings = server_settings(command)
    run(_serve(command, settings))


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


async def _serve(command: ServeCommand, settings: ServerSettings) -> None:
    async with started_engine(command.config, command.publish) as engine:
        app = create_app(engine, settings)
        serving = asyncio.create_task(serve_app(app, host=command.host, port=command.port, max_connections=command.max_connections))
        name = (settings.served_model_names or (command.config.model,))[0]
        print(f"serving {name} at http://{command.host}:{command.port}/v1 ({_who(settings)})", file=sys.stderr, flush=True)
        try:
            await serving
        finally:
            serving.cancel()
            await asyncio.wait([serving])


def _who(settings: ServerSettings) -> str:
    return "with an API key" if settings.api_key is not None else "no API key"
