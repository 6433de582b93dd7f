# SPDX-License-Identifier: Apache-2.0
"""HTTP server with the tiny model; can require a header or be unavailable."""

import threading
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.controller_harness import TINY


class FakeModelServer:
    """Serves the same model under every folder, from its construction on."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.num_requests = 0
        self.required_key = ""
        """Required value of the header X-Key; empty: not required."""
        self.is_down = False
        model_server = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                model_server.num_requests += 1
                self.path = f"/{self.path.rpartition('/')[2]}"
                if model_server.is_down:
                    self.send_error(503)
                elif model_server.required_key and self.headers.get("X-Key") != model_server.required_key:
                    self.send_error(401)
                else:
                    # A client can close the connection before the end of the file.
                    with suppress(ConnectionError):
                        super().do_GET()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer((host, 0), partial(Handler, directory=str(TINY)))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        host, port = self.server.server_address[:2]
        return f"http://{host!s}:{port}"

    def close(self) -> None:
        """Stop the server."""
        self.server.shutdown()
        self.server.server_close()
