"""`aioengine chat`: a conversation on the terminal.

The engine runs on an event loop in a thread of its own and the main thread reads the keyboard, so that line editing and
Ctrl-C behave as in any other terminal program: Ctrl-C while the model answers stops the answer, and nothing else.
SIGTERM leaves after the answer that is being generated.
"""

from __future__ import annotations

import asyncio
import queue
import signal
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from aioengine.commands.runtime import (
    describe,
    for_output,
    interrupts_handled_by,
    interrupts_leave_at_once,
    loop_factory,
    publishing,
    status,
    use_color,
)
from aioengine.commands.termination import EXIT_TERMINATED, signals_handled_by
from aioengine.config import EngineConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.publish_options import PublishOptions
from aioengine.errors import InvalidRequestError
from aioengine.outputs import RequestOutput
from aioengine.printable import printable
from aioengine.sampling_params import SamplingParams

T = TypeVar("T")
Message = dict[str, str]

_HELP = """\
/help   this text
/reset  forget the conversation (the system message stays)
/exit   leave, as Ctrl-D does
Ctrl-C  stops an answer; what has arrived stays in the conversation"""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    config: EngineConfig
    params: SamplingParams
    system: str | None
    publish: PublishOptions
    stats: bool


class _LoopThread:
    """An event loop in a thread of its own, to which the main thread hands coroutines."""

    def __enter__(self) -> Self:
        self._loop = (loop_factory() or asyncio.new_event_loop)()
        self._thread = threading.Thread(target=self._loop.run_forever, name="aioengine-loop", daemon=True)
        self._thread.start()
        return self

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.submit(self._loop.shutdown_asyncgens()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Conversation:
    """The messages so far, and what it takes to get the next answer."""

    def __init__(self, engine: AsyncEngine, loop: _LoopThread, settings: ChatSettings) -> None:
        self._engine = engine
        self._loop = loop
        self._settings = settings
        self._system: list[Message] = [{"role": "system", "content": settings.system}] if settings.system is not None else []
        self.messages: list[Message] = []
        self._task: asyncio.Task[None] | None = None  # of the answer that is being generated
        self._is_answering = False
        self.is_over = False  # after the answer at hand

    def reset(self) -> None:
        self.messages.clear()

    def ask(self, text: str) -> RequestOutput | None:
        """Send `text`, print the answer as it arrives, and return the last output; None if nothing came.

        Ctrl-C stops the answer: the request is aborted and what has arrived stays in the conversation. Raises
        InvalidRequestError if the conversation no longer fits; the conversation is then as it was before.
        """
        self.messages.append({"role": "user", "content": text})
        self._is_answering = True
        arrived: queue.SimpleQueue[RequestOutput | None] = queue.SimpleQueue()
        answer = self._loop.submit(self._generate(arrived))
        last: RequestOutput | None = None
        try:
            while (output := arrived.get()) is not None:
                last = output
                sys.stdout.write(for_output(output.text_delta, sys.stdout))
                sys.stdout.flush()
            answer.result()
        except KeyboardInterrupt:
            self._loop.submit(self._stop()).result()  # returns when the request is gone, so that the next one starts clean
        except BaseException:
            self.messages.pop()
            raise
        finally:
            self._is_answering = False
        sys.stdout.write("\n")
        self.messages.append({"role": "assistant", "content": last.text if last is not None else ""})
        return last

    def on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """Let an answer that is being generated come to its end; without one, or the second time, leave at once."""
        if self._is_answering and not self.is_over:
            self.is_over = True
            print("\nSIGTERM: this answer is the last one; a second signal does not wait for it", file=sys.stderr)
        else:
            raise SystemExit(EXIT_TERMINATED)

    async def _generate(self, arrived: queue.SimpleQueue[RequestOutput | None]) -> None:
        self._task = asyncio.current_task()
        stream = self._engine.generate([*self._system, *self.messages], self._settings.params)
        try:
            async for output in stream:
                arrived.put(output)
        finally:
            await stream.aclose()
            arrived.put(None)

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


def chat(settings: ChatSettings) -> None:
    interactive = sys.stdin.isatty()
    with interrupts_leave_at_once(), _LoopThread() as loop:
        engine = AsyncEngine(settings.config, **publishing(settings.publish))
        try:
            with status(f"loading {settings.config.model} ..."):
                loop.submit(engine.start()).result()
            if not engine.tokenizer.has_chat_template:
                raise InvalidRequestError(f"{settings.config.model} has no chat template: use `aioengine generate --raw`")
            if interactive:
                _enable_line_editing()
                print(f"{printable(engine.model_info.name)}: /help lists the commands, Ctrl-D leaves")
            conversation = Conversation(engine, loop, settings)
            with interrupts_handled_by(signal.default_int_handler), signals_handled_by(signal.SIGTERM, conversation.on_sigterm):
                _converse(conversation, interactive=interactive, stats=settings.stats)
        finally:
            loop.submit(engine.shutdown()).result()


def _converse(conversation: Conversation, *, interactive: bool, stats: bool) -> None:
    prompt = _prompt() if interactive else ""
    while not conversation.is_over:
        try:
            line = input(prompt).strip()
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:  # an unfinished line is dropped, as a shell does
            print()
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/help":
            print(_HELP)
        elif line == "/reset":
            conversation.reset()
            print("The conversation is forgotten.")
        elif line.startswith("/"):
            print(f"unknown command {printable(line.split()[0])}; /help lists the commands")
        elif line:
            _answer(conversation, line, stats=stats)


def _answer(conversation: Conversation, line: str, *, stats: bool) -> None:
    try:
        output = conversation.ask(line)
    except InvalidRequestError as exc:
        print(f"aioengine: error: {printable(str(exc))}\n/reset starts a new conversation", file=sys.stderr)
        return
    if output is None:
        return
    if output.finish_reason == "length":
        print("(cut: --max-tokens allows longer answers)", file=sys.stderr)
    if output.finish_reason == "repetition":
        print("(cut: the answer repeats itself)", file=sys.stderr)
    if stats and output.finished:
        print(f"({describe(output)})", file=sys.stderr)


def _prompt() -> str:
    # readline must be told which bytes take no space, or it misjudges the width of the line.
    return "\x01\x1b[1m\x02> \x01\x1b[0m\x02" if use_color() else "> "


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401 - importing it gives input() a history and the arrow keys
    except ImportError:  # a Python built without it still reads lines
        return
