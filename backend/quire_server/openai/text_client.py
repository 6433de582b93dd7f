# SPDX-License-Identifier: Apache-2.0
"""The client with which the front connects to the text process. It also keeps what it has learned about
the checkpoint."""

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
        self._base: ServedModels | None = None
        """The last answer of the text process about the base model."""

    async def models(self, api_key_name: str = "") -> ServedModels:
        """Return the models that requests of an API key can name; raises QuireError if the text process does not
        answer."""
        return await self.call("models", ServedModels, {"api_key_name": api_key_name})

    async def sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling parameters in the checkpoint's generation_config.json; raises QuireError if they cannot
        be read."""
        return (await self._base_model()).sampling_defaults

    async def has_thinking_budget(self) -> bool:
        """Return whether requests can limit the reasoning of the model; raises QuireError as above."""
        return (await self._base_model()).has_thinking_budget

    async def pooling(self) -> ServedModels:
        """Return what the base model returns for requests with `pooling`; raises QuireError as above."""
        return await self._base_model()

    def on_closed(self, connection: Connection) -> None:
        """Called when the connection closes. The next text process can have other defaults."""
        self._base = None
        super().on_closed(connection)

    async def _base_model(self) -> ServedModels:
        if self._base is None:
            self._base = await self.models()
        return self._base
