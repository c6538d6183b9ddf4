"""Which attention backend serves a configuration: the candidates in order of preference, asked one after the other."""

from __future__ import annotations

from importlib import import_module

import torch

from aioengine.attention.base import AttentionBackend, AttentionConfig
from aioengine.errors import ConfigError
from aioengine.printable import get_logger

logger = get_logger(__name__)

# Dotted names, so that a backend's own dependencies are imported only when it is asked. Fastest first; the reference,
# which runs everywhere, is last.
_CANDIDATES: tuple[tuple[str, str], ...] = (
    ("triton", "aioengine.attention.triton_paged:TritonPagedBackend"),
    ("cpu_paged", "aioengine.attention.cpu_paged:CpuPagedBackend"),
    ("torch_paged", "aioengine.attention.torch_paged:TorchPagedBackend"),
)


def select_attention_backend(name: str, config: AttentionConfig, device: torch.device) -> AttentionBackend:
    """The backend called `name`, or for "auto" the first candidate that supports `config` on `device`.

    Raises ConfigError if the name is unknown, if the named backend does not fit, or if none does; the message says why.
    """
    candidates = dict(_CANDIDATES)
    if name != "auto" and name not in candidates:
        raise ConfigError(f"unknown attention_backend {name!r}; known: auto, {', '.join(candidates)}")
    reasons: list[str] = []
    for candidate in candidates if name == "auto" else (name,):
        backend_class = _load(candidates[candidate])
        reason = backend_class.supports(config, device)
        if reason is None:
            logger.info("attention backend %s on %s%s", candidate, device, f" ({'; '.join(reasons)})" if reasons else "")
            return backend_class(config)
        reasons.append(f"{candidate}: {reason}")
    raise ConfigError(f"attention_backend {name!r} cannot serve this model on {device}: {'; '.join(reasons)}")


def _load(path: str) -> type[AttentionBackend]:
    module, _, attribute = path.partition(":")
    backend_class: type[AttentionBackend] = getattr(import_module(module), attribute)
    return backend_class
