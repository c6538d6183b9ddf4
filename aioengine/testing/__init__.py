"""For tests, of this package and of programs that use it: an engine without a model, and small requests and schedulers.

    engine = AsyncEngine(executor=FakeExecutor(), tokenizer=FakeTokenizer())

Nothing here imports torch. `FakeExecutor` follows the worker's side of the `SchedulerOutput` contract to the letter and
fails a step that breaks it, so an engine test is a scheduler test as well.
"""

from aioengine.testing.books import ContractError
from aioengine.testing.builders import make_model_info, make_request, make_scheduler
from aioengine.testing.executor import FakeExecutor
from aioengine.testing.tokens import BOS_TOKEN_ID, EOS_TOKEN_ID, FakeTokenizer, NextToken, default_next_token, scripted
from aioengine.testing.virtual_time import VirtualTimeLoop, in_virtual_time

__all__ = [
    "BOS_TOKEN_ID",
    "EOS_TOKEN_ID",
    "ContractError",
    "FakeExecutor",
    "FakeTokenizer",
    "NextToken",
    "VirtualTimeLoop",
    "default_next_token",
    "in_virtual_time",
    "make_model_info",
    "make_request",
    "make_scheduler",
    "scripted",
]
