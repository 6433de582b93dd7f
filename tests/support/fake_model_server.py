# SPDX-License-Identifier: Apache-2.0
"""A web server with the tiny model, which may ask for a header, or be away."""

import threading
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.controller_harness import TINY


class FakeModelServer:
    """Begins to serve when it is made. The model is in each folder that somebody asks for."""

    def __init__(self) -> None:
        self.required_key = ""
        """What X-Key has to be; empty: anything."""
        self.is_down = False
        model_server = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                self.path = f"/{self.path.rpartition('/')[2]}"
                if model_server.is_down:
                    self.send_error(503)
                elif model_server.required_key and self.headers.get("X-Key") != model_server.required_key:
                    self.send_error(401)
                else:
                    # Whoever has read enough closes the connection.
                    with suppress(ConnectionError):
                        super().do_GET()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(TINY)))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        """Serve no longer."""
        self.server.shutdown()
        self.server.server_close()
