"""The way of a checked request into the core, under names that are unique there, and its end from outside."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from aioengine.engine.inputs.parallel_sampling import child_id, child_params
from aioengine.engine.loop.engine_core import EngineCore
from aioengine.engine.outputs.output_collector import OutputCollector
from aioengine.engine.outputs.output_processor import OutputProcessor
from aioengine.engine.processed_input import ProcessedInput
from aioengine.errors import AioEngineError, InvalidRequestError
from aioengine.request import Request, RequestStatus

_MAX_UNATTENDED = 16


class Submitter:
    """Keeps what the core schedules and what the output processor reads in step. Nothing here waits.

    publish_text: events may show the prompts.
    """

    def __init__(self, core: EngineCore, output: OutputProcessor, *, publish_text: bool) -> None:
        self._core = core
        self._output = output
        self._publish_text = publish_text
        self._numbers = itertools.count(1)
        self._unattended: OrderedDict[str, OutputCollector] = OrderedDict()  # by scheduled id, the latest

    def check_request_id_is_free(self, request_id: str | None) -> None:
        """Raise InvalidRequestError if a live request has this name."""
        if request_id is not None and self._output.scheduled_ids(request_id):
            raise InvalidRequestError(f"request_id {request_id!r} is in use by a live request")

    def submit(
        self,
        processed: ProcessedInput,
        *,
        request_id: str | None,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
        final_only: bool = False,
    ) -> OutputCollector:
        """Hand a request to the core, all of its continuations or none; returns its way out.

        request_id: None: one is made up. arrival_time: seconds of `time.perf_counter()`. final_only: whatever the
        parameters say, only the final output is of interest.

        Raises InvalidRequestError if the name is taken or the request can never run, EngineDeadError if nothing can.
        """
        self.check_request_id_is_free(request_id)
        user_id = request_id if request_id is not None else self._new_request_id()
        params = child_params(processed.sampling_params)
        requests = [
            Request(
                scheduled_id,
                processed.prompt_token_ids,
                sampling_params=params[index],
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                block_hashes=processed.block_hashes,
                num_external_blocks=processed.num_external_blocks,
                pooling_params=processed.pooling_params,
                lora_name=processed.lora_name,
                lora_key=processed.lora_key,
            )
            for index, scheduled_id in enumerate(self._new_scheduled_ids(user_id, len(params)))
        ]
        try:
            collector = self._output.add_request(
                requests[0].request_id,
                user_id,
                processed,
                now=arrival_time,
                final_only=final_only,
                sibling_ids=[request.request_id for request in requests[1:]],
            )
            for request in requests:
                self._core.add_request(request, prompt=processed.prompt if self._publish_text else None, grammar=processed.grammar)
        except BaseException as exc:
            # Nothing was awaited, so those that were added have not been scheduled yet.
            self._core.finish_requests([request.request_id for request in requests], RequestStatus.FINISHED_ABORTED)
            self._output.discard(user_id)
            if isinstance(exc, AioEngineError) or not isinstance(exc, Exception):
                raise
            # A tokenizer that cannot decode the end of the prompt, or a grammar that cannot start: it is this request's.
            raise InvalidRequestError(f"the request cannot be started: {type(exc).__name__}: {exc}") from exc
        return collector

    def submit_unattended(self, processed: ProcessedInput, *, arrival_time: float) -> str:
        """As `submit`, for a request that nobody awaits; returns the id that events show. The latest can be read for a while."""
        collector = self.submit(processed, request_id=None, arrival_time=arrival_time, final_only=True)
        scheduled_id = self.scheduled_ids(collector.request_id)[0]
        self._unattended[scheduled_id] = collector
        while len(self._unattended) > _MAX_UNATTENDED:
            self._unattended.popitem(last=False)
        return scheduled_id

    def read_unattended(self, scheduled_id: str) -> tuple[str, bool] | None:
        """(text so far, whether it has ended) of one of the latest of `submit_unattended`."""
        collector = self._unattended.get(scheduled_id)
        return None if collector is None else (collector.read_text(), collector.finished)

    def _new_scheduled_ids(self, user_id: str, num_ids: int) -> Sequence[str]:
        names = [user_id] if num_ids == 1 else [child_id(user_id, index) for index in range(num_ids)]
        # The user may reuse a name that has just ended: the worker still knows that one.
        return [self._unused(name) for name in names]

    def _unused(self, name: str) -> str:
        scheduled_id = name
        while self._core.knows(scheduled_id):
            scheduled_id = f"{name}~{next(self._numbers)}"
        return scheduled_id

    def _new_request_id(self) -> str:
        while True:
            request_id = f"req-{next(self._numbers)}"
            if not self._core.knows(request_id) and not self._output.scheduled_ids(request_id):
                return request_id

    def scheduled_ids(self, request_id: str) -> tuple[str, ...]:
        """The names that events show for what is live of a request; empty: no such request is live."""
        return self._output.scheduled_ids(request_id)

    def is_live(self, request_id: str) -> bool:
        """There is a live request of this name, the user's or the scheduler's. May be asked in any thread."""
        return bool(self._output.scheduled_ids(request_id)) or self._output.is_live(request_id)

    def abort(self, request_id: str) -> bool:
        """End all continuations of a request with the reason "abort". False if no such request is live."""
        return self._abort(self._output.scheduled_ids(request_id))

    def abort_scheduled(self, scheduled_id: str) -> bool:
        """End one continuation, by the name that events show; others of the same request go on."""
        return self._abort([scheduled_id] if self._output.is_live(scheduled_id) else [])

    def drop(self, collector: OutputCollector) -> None:
        """The consumer is gone: end its request, if it has not ended."""
        if not collector.finished:
            self.abort(collector.request_id)

    def time_out(self, collector: OutputCollector) -> int | None:
        """End what has not ended of a request; returns how many output tokens that has, None if there is nothing to end."""
        scheduled_ids = () if collector.finished else self._output.scheduled_ids(collector.request_id)
        requests = self._core.scheduler.requests
        num_output_tokens = sum(requests[req_id].num_output_tokens for req_id in scheduled_ids if req_id in requests)
        return num_output_tokens if self._abort(scheduled_ids) else None

    def _abort(self, scheduled_ids: Sequence[str]) -> bool:
        self._core.finish_requests(scheduled_ids, RequestStatus.FINISHED_ABORTED)
        self._output.abort(scheduled_ids)
        return bool(scheduled_ids)
