"""What the executor and its ranks say to each other: pickles over a connection that nobody else has.

To a rank: (call id, method, arguments). Back: (call id, True, value) or (call id, False, exception); and (None, level, logger, text)
for a line of the rank's log.
"""

from __future__ import annotations

import pickle
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioengine.resolved_config import ResolvedConfig

if TYPE_CHECKING:
    from aioengine.checkpoint.files import ModelFiles
    from aioengine.outputs import ModelRunnerOutput

PING, PREPARE, MEET = "ping", "prepare", "meet"  # beside the executor's own calls


@dataclass(frozen=True, slots=True)
class RankStart:
    """The first message to a rank. config: of all ranks, but for what is this one's own, such as its device and its threads."""

    rank: int
    size: int
    host: str  # where this rank can be reached by the others
    config: ResolvedConfig
    files: ModelFiles
    log_level: int


def dump(message: object) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


load = pickle.loads


def dump_rpc(method: Callable[..., Any] | str, args: tuple[Any, ...]) -> bytes:
    """By itself, so that a function that a rank cannot import fails this call and not the reading of the message."""
    try:
        return dump((method, args))
    except (pickle.PicklingError, AttributeError, TypeError) as exc:
        raise TypeError(f"{method!r} and its arguments must be pickled for the ranks, so it must stand in a module by name: {exc}") from exc


def portable(error: BaseException, *, where: str) -> BaseException:
    """The exception in a form that survives the way, with its traceback as a note."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        copy = load(dump(error))
        if type(copy) is not type(error):
            raise TypeError("it came back as something else")
    except Exception:  # of whatever the exception holds
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(f"{where}:\n{text}")
    return copy  # type: ignore[no-any-return]


def fingerprint(output: ModelRunnerOutput) -> int:
    """Of the sampled tokens: ranks that differ here have come apart."""
    return zlib.crc32(repr(output.sampled_token_ids).encode())
