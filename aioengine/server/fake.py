"""`aioengine serve --fake`: the server and the scheduler over an executor without a model, which says what a script says.

    async with ScriptedEngine(script=read_script("answers.json")) as engine:
        app = create_app(engine)

For the tests of programs that talk to a server. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from aioengine.config import EngineConfig
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.inputs.input_processor import Prompt, TextPrompt
from aioengine.engine.inputs.submission import Submitter
from aioengine.engine.outputs.output_collector import OutputCollector
from aioengine.engine.outputs.output_stream import OutputStream, Submit
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import SamplingParams
from aioengine.server.errors import RequestError
from aioengine.server.script import Answer, Play, Script, written_forms
from aioengine.testing.books import WorkerRequest
from aioengine.testing.builders import make_model_info
from aioengine.testing.executor import FakeExecutor
from aioengine.testing.tokens import EOS_TOKEN_ID, FakeTokenizer

MODEL_NAME = "fake"
_MAX_MODEL_LEN = 131_072
_BLOCK_SIZE = 16
_ARG = "aioengine_answer"  # of SamplingParams.extra_args: which answer of the script a request gets
_SEGMENT = re.compile(r"<\|(\w+)\|>(.*?)(?=<eos>|\Z)", re.DOTALL)

# Under a grammar that the script does not match: what ends an answer soonest comes first. The quote is before the brackets,
# which have no end within a text.
_PREFERRED: tuple[int, ...] = (EOS_TOKEN_ID, *b'"}]:,0ntf{[')


class ScriptedTokenizer(FakeTokenizer):
    """Takes every role."""

    def _turn(self, message: Mapping[str, Any]) -> tuple[str, Any]:
        return message["role"], message.get("content") or ""


class ScriptedExecutor(FakeExecutor):
    """Each request's tokens are those of its answer; under a grammar, of the form of it that the grammar takes."""

    def __init__(self, play: Play) -> None:
        super().__init__(
            num_blocks=_MAX_MODEL_LEN // _BLOCK_SIZE + 1,
            block_size=_BLOCK_SIZE,
            model_info=make_model_info(max_position_embeddings=_MAX_MODEL_LEN),
        )
        self._play = play
        self._forms: dict[int, list[bytes]] = {}

    def _answer(self, params: SamplingParams) -> Answer:
        return self._play.answer(params.extra_args.get(_ARG, -1))

    def _forms_of(self, params: SamplingParams) -> list[bytes]:
        index = params.extra_args.get(_ARG, -1)
        if index not in self._forms:
            self._forms[index] = [form.encode() for form in written_forms(self._play.answer(index))]
        return self._forms[index]

    # ------------------------------------------------------------------ in the worker's thread
    def _execute(self, output: SchedulerOutput) -> None:
        self.outputs.clear()  # a server runs for days
        self.forward_s = self._step_s(output)
        super()._execute(output)

    def _step_s(self, output: SchedulerOutput) -> float:
        script = self._play.script
        params = [new.sampling_params for new in output.scheduled_new_reqs]
        params += [self._books.requests[req_id].sampling_params for req_id in output.scheduled_cached_reqs.req_ids]
        rates = [rate for rate in (script.tokens_per_s, *(self._answer(p).tokens_per_s for p in params)) if rate is not None]
        seconds = 1 / min(rates) if rates else 0.0
        num_prompt_tokens = output.total_num_scheduled_tokens - len(output.num_scheduled_tokens)
        if script.prefill_tokens_per_s is not None:
            seconds += num_prompt_tokens / script.prefill_tokens_per_s
        return seconds

    def _fails(self, req_id: str, request: WorkerRequest) -> str | None:
        limit = self._answer(request.sampling_params).fail_after_tokens
        if limit is not None and len(request.token_ids) - request.num_prompt_tokens >= limit:
            return f"the script lets it fail after {limit} tokens"
        return super()._fails(req_id, request)

    def _pick(self, request: WorkerRequest, bitmask: bytes | None) -> int:
        params = request.sampling_params
        num_output = len(request.token_ids) - request.num_prompt_tokens
        forms = self._forms_of(params)
        if bitmask is None:
            text = forms[0] or b" "
            if params.ignore_eos or num_output < params.min_tokens:
                return text[num_output % len(text)]  # once more from the beginning
            return text[num_output] if num_output < len(text) else EOS_TOKEN_ID
        said = bytes(token_id for token_id in request.token_ids[request.num_prompt_tokens :] if token_id < 256)
        for form in forms:
            token_id = form[num_output] if num_output < len(form) else EOS_TOKEN_ID
            if len(said) == num_output and form.startswith(said) and _is_allowed(token_id, bitmask):
                return token_id
        for token_id in _PREFERRED:
            if _is_allowed(token_id, bitmask):
                return token_id
        return self._next_allowed(ord("a"), bitmask)


def _is_allowed(token_id: int, bitmask: bytes) -> bool:
    return bool(bitmask[token_id // 8] >> token_id % 8 & 1)


class _Cut:
    """After how many tokens the script drops the connection; None: never. Known when the request is submitted."""

    after_tokens: int | None = None


class _ScriptedStream(OutputStream):
    """Raises ConnectionAbortedError after so many tokens."""

    __slots__ = ("_cut", "_num_tokens")

    def __init__(self, submit: Submit, *, timeout: float | None, engine: object, cut: _Cut) -> None:
        super().__init__(submit, timeout=timeout, engine=engine)
        self._cut = cut
        self._num_tokens = 0

    def _take_now(self, collector: OutputCollector) -> RequestOutput:
        most = self._cut.after_tokens
        if most is not None and self._num_tokens >= most:
            raise ConnectionAbortedError(f"the script drops the connection after {most} tokens")
        output = super()._take_now(collector)
        self._num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        return output


class ScriptedEngine(AsyncEngine):
    """An `AsyncEngine` that answers as `script` says, with every setting of the real one. `options` are those of `AsyncEngine`."""

    def __init__(self, model: str | EngineConfig = MODEL_NAME, *, script: Script | None = None, **options: Any) -> None:
        self._play = Play(script or Script())
        super().__init__(model, executor=ScriptedExecutor(self._play), tokenizer=ScriptedTokenizer(), **options)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
        timeout: float | None = None,
    ) -> OutputStream:
        """As `AsyncEngine.generate`. Raises RequestError where the script says so, at the first iteration."""
        cut = _Cut()
        given = {"request_id": request_id, "priority": priority, "cache_salt": cache_salt, "lora": lora}
        return _ScriptedStream(partial(self._submit_answer, cut, prompt, sampling_params, **given), timeout=timeout, engine=self, cut=cut)

    async def _submit_answer(
        self, cut: _Cut, prompt: Prompt, sampling_params: SamplingParams | None, **given: Any
    ) -> tuple[OutputCollector, Submitter]:
        index = self._play.next_answer(*self._last_message(prompt))
        answer = self._play.answer(index)
        if answer.delay_ms:
            await asyncio.sleep(answer.delay_ms / 1000)
        if answer.error is not None:
            raise RequestError(answer.error.status, answer.error.message, kind=answer.error.type)
        cut.after_tokens = answer.disconnect_after_tokens
        params = sampling_params if sampling_params is not None else SamplingParams()
        params = params.with_values(extra_args={**params.extra_args, _ARG: index})
        return await self._submit(prompt, params, **given)

    def _last_message(self, prompt: Prompt) -> tuple[str | None, str]:
        """Who wrote it, None where the prompt is no chat, and what."""
        tokenizer = self.tokenizer
        if isinstance(prompt, TextPrompt):
            prompt = prompt.text
        if not isinstance(prompt, str):
            items: list[Any] = list(prompt)
            is_chat = bool(items) and isinstance(items[0], Mapping)
            try:
                prompt = tokenizer.apply_chat_template(items) if is_chat else tokenizer.decode(items, skip_special_tokens=False)
            except (TypeError, ValueError, KeyError, LookupError):
                return None, ""  # the engine will say what is wrong with it
        segments = _SEGMENT.findall(prompt.removesuffix("<|assistant|>"))
        return segments[-1] if segments else (None, prompt)
