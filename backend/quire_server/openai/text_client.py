# SPDX-License-Identifier: Apache-2.0
"""The client with which the front connects to the text process. It also keeps the sampling defaults of the
checkpoint."""

import os
from pathlib import Path
from typing import Any

from quire_spec.protocol.connection import Connection
from quire_spec.protocol.messages import Hello
from quire_spec.protocol.request_client import RequestClient
from quire_spec.protocol.results import ServedModels


class TextClient(RequestClient):
    """The connection to the text process, with all requests and calls that are open."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Hello("openai", pid=os.getpid()))
        self._sampling_defaults: dict[str, Any] | None = None

    async def models(self, api_key_name: str = "") -> ServedModels:
        """Return the models that requests of an API key can name; raises QuireError if the text process does not
        answer."""
        return await self.call("models", ServedModels, {"api_key_name": api_key_name})

    async def sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling parameters in the checkpoint's generation_config.json; raises QuireError if they cannot
        be read."""
        if self._sampling_defaults is None:
            self._sampling_defaults = (await self.models()).sampling_defaults
        return self._sampling_defaults

    def on_closed(self, connection: Connection) -> None:
        """Called when the connection closes. The next text process can have other defaults."""
        self._sampling_defaults = None
        super().on_closed(connection)
