"""What a server is told beside its engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from aioengine.errors import ConfigError
from aioengine.server.tool_formats import FORMATS

DEFAULT_MAX_BODY_BYTES = 8 << 20
DEFAULT_MAX_TOTAL_BODY_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """served_model_names: the names that requests may call the model by; the first one is in the answers. Empty: the engine's own.

    api_key: what every request but those for /health and /ping must show, as `Authorization: Bearer` or `x-api-key`. None: none.
    allowed_hosts: names in the `Host` header that are answered, so that no foreign page reaches a server on this machine through a
        name of its own. Empty: all. allowed_origins: pages of these origins may call; a browser's other pages are refused.
    max_body_bytes: the largest body; max_total_body_bytes: of all that are being read. read_timeout_s: seconds for a whole body.
    send_timeout_s: how long a reader may take nothing.
    tool_call_parser: how the model writes that it calls a tool: "hermes", "llama3_json" or "mistral". None: as its chat template says.
    max_stored_responses: how many answers of /v1/responses are kept, for `previous_response_id` and for who asks for them again.
    log_requests: log each request's prompt and parameters.

    Raises ConfigError naming the value and the limit.
    """

    served_model_names: Sequence[str] = ()
    api_key: str | None = field(default=None, repr=False)
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_total_body_bytes: int = DEFAULT_MAX_TOTAL_BODY_BYTES
    read_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    tool_call_parser: str | None = None
    max_stored_responses: int = 1000
    log_requests: bool = False

    def __post_init__(self) -> None:
        for name in self.served_model_names:
            if not name:
                raise ConfigError("served_model_names must hold non-empty names")
        if self.api_key is not None and (len(self.api_key) < 8 or not self.api_key.isascii() or not self.api_key.isprintable()):
            raise ConfigError("the API key must have at least 8 printable ASCII characters")
        if self.max_body_bytes < 1024:
            raise ConfigError(f"max_body_bytes must be at least 1024, got {self.max_body_bytes}")
        if self.max_total_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_total_body_bytes must be at least max_body_bytes ({self.max_body_bytes}), got {self.max_total_body_bytes}"
            )
        if self.tool_call_parser is not None and self.tool_call_parser not in FORMATS:
            raise ConfigError(f"tool_call_parser must be one of {', '.join(FORMATS)}, got {self.tool_call_parser!r}")
        if self.max_stored_responses < 0:
            raise ConfigError(f"max_stored_responses must be at least 0, got {self.max_stored_responses}")
        for name in ("read_timeout_s", "send_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a finite number of seconds above 0, got {value}")
