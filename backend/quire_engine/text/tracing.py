# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of requests, which are exported by OTLP.

A request has a span of its own, with the spans `queue`, `prefill` and `decode` in it. If it had to wait for its
adapter, `queue` contains the span `adapter_wait`. The parent is the span of the client, if the client sent the header
traceparent. The spans are made when the request ends, from the times that the metrics use, so that tracing costs
nothing while tokens are generated. Attributes follow the GenAI conventions.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Protocol

from quire_engine.requests.request_state import RequestState
from quire_spec.errors import ConfigError

logger = logging.getLogger(__name__)

_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_TRACES_PATH = "/v1/traces"
_CLOSE_LIMIT_S = 1.0
"""When the process ends, it waits at most this many seconds until the last spans are exported."""


class Tracer(Protocol):
    """Receives each request when it ends."""

    def record(self, request_state: RequestState, finish_reason: str, error: str, now: float) -> None:
        """Record a request that ends. `finish_reason` is stop, length, abort or error, and `error` is the code of an
        error, or empty. `now` is the time in monotonic seconds."""

    def close(self) -> None:
        """Export the last spans. The call takes at most a second."""


class NoTracer:
    """The tracer if tracing is off."""

    def record(self, request_state: RequestState, finish_reason: str, error: str, now: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def create_tracer(endpoint: str | None, served_name: str, environment: Mapping[str, str] = os.environ) -> Tracer:
    """Return the tracer for an OTLP endpoint. Without an endpoint, nothing is traced.

    The variables OTEL_* of the SDK have their usual meaning. Without a protocol in them, an endpoint whose path is
    /v1/traces is used with HTTP, and other endpoints with gRPC.

    Raises:
        ConfigError: the packages of OpenTelemetry are not installed, or a protocol is unknown.
    """
    if endpoint is None:
        return NoTracer()
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "otlp_traces_endpoint: OpenTelemetry is not installed; pip install 'quire-llm[tracing]'"
        ) from error
    # Variables such as OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME override the values here.
    resource = Resource.create({"service.name": environment.get("OTEL_SERVICE_NAME") or f"quire-{served_name}"})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint, environment)))
    logger.info("tracing on endpoint=%s", endpoint)
    return OtlpTracer(provider)


def _exporter(endpoint: str, environment: Mapping[str, str]) -> Any:
    by_path = "http/protobuf" if endpoint.rstrip("/").endswith(_TRACES_PATH) else "grpc"
    variable = next((name for name in _PROTOCOL_VARIABLES if environment.get(name)), None)
    protocol = by_path if variable is None else environment[variable]
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint)
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint, insecure=not endpoint.startswith("https://"))
    raise ConfigError(f"{variable}: {protocol!r} is not supported; use grpc or http/protobuf")


class OtlpTracer:
    """Makes the spans of requests."""

    def __init__(self, provider: Any) -> None:
        """`provider` is a TracerProvider of the SDK."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("quire", version("quire-llm"))
        self._propagator = TraceContextTextMapPropagator()
        self._to_unix_s = time.time() - time.monotonic()

    def record(self, request_state: RequestState, finish_reason: str, error: str, now: float) -> None:
        """See Tracer."""
        request, state = request_state.request, request_state
        operation = "chat" if state.is_chat else "text_completion"
        context = self._propagator.extract({"traceparent": request.traceparent}) if request.traceparent else None
        root = self._start(f"{operation} {request.model}", state.arrival_time, context, self._trace.SpanKind.SERVER)
        if not root.is_recording():
            return
        root.set_attributes(_attributes(state, operation, finish_reason))
        if error:
            root.set_attribute("error.type", error)
            root.set_status(self._trace.StatusCode.ERROR)
        inside = self._trace.set_span_in_context(root)
        queue = self._start("queue", state.arrival_time, inside)
        queue_end = now if state.start_time is None else state.start_time
        if state.adapter_wait_s:
            # The core measures how long it waited, but not when. Usually, the request starts right after the wait.
            wait = self._start("adapter_wait", queue_end - state.adapter_wait_s, self._trace.set_span_in_context(queue))
            self._end(wait, queue_end)
        self._end(queue, queue_end)
        if state.start_time is not None:
            prefill = self._start("prefill", state.start_time, inside)
            self._end(prefill, now if state.first_token_time is None else state.first_token_time)
        if state.first_token_time is not None:
            decode = self._start("decode", state.first_token_time, inside)
            self._end(decode, state.first_token_time + state.summary(now).decode_s)
        self._end(root, now)

    def close(self) -> None:
        """Export the last spans."""
        # The limit of force_flush does not end an export that hangs.
        flush = threading.Thread(target=self._provider.force_flush, daemon=True)
        flush.start()
        flush.join(_CLOSE_LIMIT_S)

    def _start(self, name: str, at: float, context: Any, kind: Any = None) -> Any:
        options = {} if kind is None else {"kind": kind}
        return self._tracer.start_span(name, context, start_time=self._to_unix_ns(at), **options)

    def _end(self, span: Any, at: float) -> None:
        span.end(self._to_unix_ns(at))

    def _to_unix_ns(self, monotonic_s: float) -> int:
        return int((monotonic_s + self._to_unix_s) * 1e9)


def _attributes(state: RequestState, operation: str, finish_reason: str) -> dict[str, Any]:
    request, params = state.request, state.params
    values: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": state.adapter.name or request.model,
        "gen_ai.response.finish_reasons": [finish_reason],
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed,
        "gen_ai.usage.input_tokens": state.num_input_tokens,
        "gen_ai.usage.output_tokens": state.num_output_tokens,
        "quire.usage.cached_tokens": state.num_cached_tokens,
        "quire.adapter.name": state.adapter.name,
        "quire.adapter.digest": state.adapter.digest,
        "quire.api_key.name": request.api_key_name or None,
    }
    return {name: value for name, value in values.items() if value is not None}
