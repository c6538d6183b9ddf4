"""A span for each generation, with its queue, prefill, decode and preemptions below it (OpenTelemetry; extra `[otel]`).

The spans are made once a request has ended, of times that the engine keeps anyway: nothing is traced while it runs. Names and
attributes are those of vLLM's traces, where it has them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from aioengine.errors import ConfigError
from aioengine.outputs import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class RequestTracer(Protocol):
    def record(self, output: RequestOutput, *, headers: Mapping[str, str]) -> None:
        """A generation has ended with this output. headers: of the HTTP request, which may name the caller's span."""


class OtelTracer:
    """Writes to an OpenTelemetry provider. `shutdown()` sends what has not been sent yet."""

    def __init__(self, provider: TracerProvider, *, model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("aioengine")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()  # of the engine's clock

    @classmethod
    def to_endpoint(cls, endpoint: str, *, model_name: str) -> OtelTracer:
        """Sends spans to an OTLP collector over HTTP, in a thread. Raises ConfigError if the extra is not installed."""
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"the endpoint for traces must be an http or https URL, got {endpoint!r}")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as exc:
            raise ConfigError(f"traces need the extra: pip install 'aioengine[otel]' ({exc})") from None
        provider = TracerProvider(resource=Resource.create({"service.name": "aioengine"}), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider, model_name=model_name)

    def shutdown(self) -> None:
        self._provider.shutdown()

    def record(self, output: RequestOutput, *, headers: Mapping[str, str]) -> None:
        from opentelemetry.trace import set_span_in_context

        metrics = output.metrics
        end = metrics.finished_time if metrics.finished_time is not None else time.perf_counter()
        caller = self._propagator.extract({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        attributes = {**_attributes(output, end), "gen_ai.response.model": self._model_name}
        span = self._tracer.start_span("llm_request", caller, start_time=self._ns(metrics.queued_time), attributes=attributes)
        context = set_span_in_context(span)
        for name, start, stop, about in _phases(metrics, end):
            self._tracer.start_span(name, context, start_time=self._ns(start), attributes=about).end(self._ns(stop))
        span.end(self._ns(end))

    def _ns(self, seconds: float) -> int:
        return self._epoch_ns + round(seconds * 1e9)


def _attributes(output: RequestOutput, end: float) -> dict[str, Any]:
    metrics = output.metrics
    found: dict[str, Any] = {
        "gen_ai.request.id": output.request_id,
        "gen_ai.request.n": len(output.outputs),
        "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.cached_tokens": output.num_cached_tokens,
        "gen_ai.response.finish_reasons": [completion.finish_reason or "abort" for completion in output.outputs],
        "gen_ai.latency.e2e": end - metrics.queued_time,
        "aioengine.num_preemptions": metrics.num_preemptions,
    }
    if metrics.queue_s is not None:
        found["gen_ai.latency.time_in_queue"] = metrics.queue_s
    if metrics.time_to_first_token_s is not None:
        found["gen_ai.latency.time_to_first_token"] = metrics.time_to_first_token_s
    return found


def _phases(metrics: RequestMetrics, end: float) -> Iterator[tuple[str, float, float, dict[str, float]]]:
    """The children: name, from, to, attributes. Those that were not reached are absent."""
    waits = {f"aioengine.wait.{reason}": seconds for reason, seconds in metrics.waits.items()}
    scheduled, first = metrics.scheduled_time, metrics.first_token_time
    yield "queue", metrics.queued_time, end if scheduled is None else scheduled, waits
    if scheduled is not None:
        yield "prefill", scheduled, end if first is None else first, {}
    if first is not None:
        yield "decode", first, end, {}
    for start, stop in metrics.preemptions:
        yield "preempted", start, stop, {}
