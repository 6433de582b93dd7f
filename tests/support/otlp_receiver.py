# SPDX-License-Identifier: Apache-2.0
"""Receives OTLP traces over gRPC and HTTP, and keeps the spans; and a real OpenTelemetry Collector in front of it."""

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
import yaml
from nodocker_cluster.controllers import COLLECTOR
from nodocker_cluster.ports import free_ports
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class OtlpReceiver(TraceServiceServicer):
    """Both servers; use it as a context manager."""

    def __init__(self) -> None:
        self.spans, self.resources = [], []
        self.grpc_server = grpc.server(futures.ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self.grpc_server)
        self.grpc_port = self.grpc_server.add_insecure_port("127.0.0.1:0")
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces", self.path
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.Export(ExportTraceServiceRequest.FromString(body), None)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http_port = self.http_server.server_port

    def __enter__(self) -> "OtlpReceiver":
        self.grpc_server.start()
        threading.Thread(target=self.http_server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.grpc_server.stop(0).wait()
        self.http_server.shutdown()
        self.http_server.server_close()

    def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
        for resource_spans in request.resource_spans:
            self.resources.append(attributes(resource_spans.resource))
            for scope_spans in resource_spans.scope_spans:
                self.spans += scope_spans.spans
        return ExportTraceServiceResponse()

    def trace(self, trace_id: str):
        """Return the spans of a trace by name."""
        return {span.name: span for span in self.spans if span.trace_id.hex() == trace_id}


@contextlib.contextmanager
def running_collector(receiver: OtlpReceiver, folder: Path) -> Iterator[int]:
    """Run a collector that sends what it gets to the receiver, and yield its gRPC port."""
    if not COLLECTOR.folder.exists():
        pytest.skip("the OpenTelemetry Collector is not built: run make cluster-tools")
    port, config = free_ports(1)[0], folder / "collector.yaml"
    document = {
        "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": f"127.0.0.1:{port}"}}}},
        "exporters": {"otlp_http": {"endpoint": f"http://127.0.0.1:{receiver.http_port}", "compression": "none"}},
        "service": {
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["otlp_http"]}},
            "telemetry": {"metrics": {"level": "none"}},
        },
    }
    config.write_text(yaml.safe_dump(document))
    with (folder / "collector.log").open("wb") as log:
        process = subprocess.Popen([COLLECTOR.folder / "otelcol", f"--config=file:{config}"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                yield port
                return
            time.sleep(0.05)
        raise AssertionError((folder / "collector.log").read_text())
    finally:
        process.terminate()
        process.wait(10)


def attributes(span):
    """Return the attributes of a span or a resource."""
    return {item.key: _value(item.value) for item in span.attributes}


def _value(value):
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
