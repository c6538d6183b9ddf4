"""A span a request, with what its time went into below it, and below the span of the caller."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from aioengine.errors import ConfigError
from aioengine.server import create_app
from aioengine.server.tracing import OtelTracer
from tests.server.sockets import Served, http, serving
from tests.waiting import until

PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@pytest.fixture
def exporter() -> Any:
    return pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: Any) -> OtelTracer:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return OtelTracer(provider, model_name="mine")


def traced(served: Served, tracer: OtelTracer) -> None:
    served.app.state.service._tracer = tracer


async def test_each_request_is_a_span_with_its_phases_below_it(exporter: Any, tracer: OtelTracer) -> None:
    body = {"prompt": "x" * 20, "max_tokens": 30, "ignore_eos": True}
    options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "num_kv_cache_blocks": 9}
    async with serving({"tokens_per_s": 400}, **options) as served:
        traced(served, tracer)
        answers = await asyncio.gather(*(served.exchange(http("POST", "/v1/completions", {**body, "stream": i > 2})) for i in range(5)))
        assert served.engine.stats().num_preemptions > 0
    assert all(answer.status == 200 for answer in answers)
    spans = exporter.get_finished_spans()
    roots = [span for span in spans if span.name == "llm_request"]
    assert len(roots) == 5
    for root in roots:
        children = [span for span in spans if span.parent is not None and span.parent.span_id == root.context.span_id]
        named = {span.name: span for span in children}
        assert {"queue", "prefill", "decode"} <= set(named)
        assert named["queue"].start_time == root.start_time
        assert named["queue"].end_time == named["prefill"].start_time
        assert named["prefill"].end_time == named["decode"].start_time
        assert named["decode"].end_time == root.end_time
        assert sum(span.name == "preempted" for span in children) == root.attributes["aioengine.num_preemptions"]
        waits = [value for name, value in named["queue"].attributes.items() if name.startswith("aioengine.wait.")]
        assert sum(waits) == pytest.approx(root.attributes["gen_ai.latency.time_in_queue"], abs=1e-6)
        assert root.attributes["gen_ai.usage.prompt_tokens"] == 21
        assert root.attributes["gen_ai.response.model"] == "mine"
        assert "x" * 20 not in str(root.attributes)
    assert sum(root.attributes["aioengine.num_preemptions"] for root in roots) > 0


async def test_the_callers_span_is_the_parent_and_who_leaves_has_a_span_too(exporter: Any, tracer: OtelTracer) -> None:
    async with serving({"tokens_per_s": 100}) as served:
        traced(served, tracer)
        await served.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, {"traceparent": PARENT})
        await served.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, {"traceparent": "nonsense"})
        async with await served.connect() as connection:
            await connection.send(http("POST", "/v1/completions", {"prompt": "x", "max_tokens": 500, "stream": True}))
            await connection.reader.readuntil(b"data:")
        await until(lambda: sum(span.name == "llm_request" for span in exporter.get_finished_spans()) == 3)
    called, alone, left = [span for span in exporter.get_finished_spans() if span.name == "llm_request"]
    assert f"{called.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{called.parent.span_id:016x}" == PARENT.split("-")[2]
    assert alone.parent is None
    assert left.attributes["gen_ai.response.finish_reasons"] == ("abort",)


async def test_a_collector_gets_the_spans_by_otlp() -> None:
    """What goes over the wire, read by OpenTelemetry's own definition of it."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        tracer = OtelTracer.to_endpoint(f"http://127.0.0.1:{collector.server_port}/v1/traces", model_name="mine")
        async with serving({"tokens_per_s": 400}) as served:
            traced(served, tracer)
            for stream in (False, True):
                body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True, "stream": stream}
                await served.post("/v1/completions", body, {"traceparent": PARENT})
        await asyncio.to_thread(tracer.shutdown)  # sends what is left
        collector.shutdown()
    (resource,) = {resource.resource.SerializeToString(): resource for batch in received for resource in batch.resource_spans}.values()
    assert {entry.key: entry.value.string_value for entry in resource.resource.attributes}["service.name"] == "aioengine"
    spans = [span for batch in received for resource in batch.resource_spans for scope in resource.scope_spans for span in scope.spans]
    roots = [span for span in spans if span.name == "llm_request"]
    assert len(roots) == 2
    assert sorted(span.name for span in spans) == sorted(["llm_request", "queue", "prefill", "decode"] * 2)
    for root in roots:
        assert root.trace_id.hex() == PARENT.split("-")[1]
        assert root.parent_span_id.hex() == PARENT.split("-")[2]
        assert {entry.key: entry.value.int_value for entry in root.attributes}["gen_ai.usage.prompt_tokens"] == 2
        children = sorted((s for s in spans if s.parent_span_id == root.span_id), key=lambda span: span.start_time_unix_nano)
        assert [span.name for span in children] == ["queue", "prefill", "decode"]
        assert abs(root.start_time_unix_nano / 1e9 - time.time()) < 60, "the wall clock's time"


def test_without_the_extra_it_is_said_and_nothing_of_it_is_imported() -> None:
    with pytest.raises(ConfigError, match="http"):
        OtelTracer.to_endpoint("localhost:4318", model_name="x")
    code = "import sys, aioengine.server.fake, aioengine.commands.serve; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert callable(create_app)
