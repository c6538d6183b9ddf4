"""What can go wrong, as one small tree: catch `AioEngineError` to catch everything this library raises on purpose."""

from __future__ import annotations


class AioEngineError(Exception):
    """Base of every error that aioengine raises on purpose."""


class ConfigError(AioEngineError, ValueError):
    """An engine setting is impossible or contradicts another one. Raised before anything is loaded."""


class ModelError(AioEngineError):
    """A model cannot be found, fetched, read or is of an unsupported family."""


class InvalidRequestError(AioEngineError, ValueError):
    """A request cannot be served as asked. Raised to the caller of `generate()`; other requests are not affected."""


class EngineOverloadedError(AioEngineError):
    """The engine refuses a request because its queue is full. Retrying later can succeed."""


class RequestTimeoutError(AioEngineError, TimeoutError):
    """A request did not end within the `timeout` of its `generate()`; it was aborted. Other requests are not affected."""


class StepTimeoutError(AioEngineError, TimeoutError):
    """A step did not come back from the worker within `step_timeout_s`. The engine dies of it: the cause of an EngineDeadError."""


class EngineDeadError(AioEngineError):
    """The engine stopped, by `shutdown()` or because a step failed; `__cause__` holds the failure if there was one."""


class RankLostError(AioEngineError):
    """A process that holds a part of the model ended, hangs, or cannot be reached. The engine dies of it."""
