# SPDX-License-Identifier: Apache-2.0
"""A double of llm-d's sidecar for prefill and decode, which runs in the decode pod before its server.

Its calls are those of llm-d-router, pkg/sidecar/proxy (chat_completions.go, connector_nixlv2.go) and
pkg/common/request (CapSingleToken), as read in November 2026:

1. It takes the first address of the header x-prefiller-host-port, and removes the header.
2. It sends the body to the prefill pod with max_tokens 1, max_completion_tokens 1, stream false, without min_tokens and
   stream_options, and with kv_transfer_params of six fields. All other headers are copied, and X-Request-Id is added.
3. A status of 502, 503 or 504 is retried. After that, the client gets the status and the body of the prefill pod.
   Releases until 0.8 sent the request to the decode pod instead (`falls_back`).
4. It sends the original body with the kv_transfer_params of the answer to the decode pod, and copies the response.
"""

import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_RETRIES = 2
_BACKOFF_S = 0.1
_HOP_BY_HOP = {"host", "content-length", "connection", "transfer-encoding"}


class Sidecar:
    """A running sidecar of a decode pod."""

    def __init__(
        self,
        decoder: str,
        falls_back: bool = False,
        change_params: Callable[[dict[str, Any]], dict[str, Any]] = lambda params: params,
    ) -> None:
        """`decoder` is the URL of the decode pod. `change_params` gets the kv_transfer_params between the two calls, so
        that a test can put a relay between the pods."""
        sidecar = self
        self._decoder, self._falls_back, self._change_params = decoder, falls_back, change_params
        self.statuses: list[int] = []
        """Statuses of prefill pods; 502 if there was no answer."""

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def do_POST(self) -> None:
                sidecar._handle(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> "Sidecar":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in _HOP_BY_HOP}
        prefillers = next((headers.pop(name) for name in list(headers) if name.lower() == "x-prefiller-host-port"), "")
        headers["X-Request-Id"] = str(uuid.uuid4())
        if prefiller := prefillers.split(",")[0].strip():
            status, answer = self._prefill(f"http://{prefiller}{handler.path}", body, headers)
            if status < 400:
                # A missing object is a warning, and the decode pod gets null.
                params = json.loads(answer).get("kv_transfer_params")
                body["kv_transfer_params"] = None if params is None else self._change_params(params)
            elif not self._falls_back:
                handler.send_response(status)
                handler.end_headers()
                handler.wfile.write(answer)
                return
        self._decode(handler, body, headers)

    def _prefill(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, bytes]:
        request = {name: value for name, value in body.items() if name not in ("min_tokens", "stream_options")}
        request |= {"max_tokens": 1, "max_completion_tokens": 1, "stream": False}
        request["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
        }
        status, answer = 502, b""
        for _ in range(_RETRIES + 1):
            try:
                http_request = urllib.request.Request(url, json.dumps(request).encode(), headers)
                with urllib.request.urlopen(http_request, timeout=60) as response:
                    status, answer = response.status, response.read()
            except urllib.error.HTTPError as error:
                with error:
                    status, answer = error.code, error.read()
            except OSError:
                status, answer = 502, b""
            self.statuses.append(status)
            if status not in (502, 503, 504):
                break
            time.sleep(_BACKOFF_S)
        return status, answer

    def _decode(self, handler: BaseHTTPRequestHandler, body: dict[str, Any], headers: dict[str, str]) -> None:
        request = urllib.request.Request(self._decoder + handler.path, json.dumps(body).encode(), headers)
        try:
            response = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            response = error
        except OSError:
            handler.send_response(502)
            handler.end_headers()
            return
        with response:
            handler.send_response(response.status)
            for name, value in response.headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    handler.send_header(name, value)
            handler.end_headers()
            while chunk := response.read1(2**16):
                handler.wfile.write(chunk)
