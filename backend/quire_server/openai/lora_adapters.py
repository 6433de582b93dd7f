# SPDX-License-Identifier: Apache-2.0
"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with the fields and responses of vLLM.

The routes change the adapter catalog, which belongs to the supervisor. Before that, http/access.py checks the admin
key. The supervisor accepts these calls only if it was started with --allow-runtime-lora-updating.
"""

import contextlib
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quire_server.openai.chat_messages import check_depth
from quire_server.openai.errors import ApiError
from quire_server.openai.http.ignored_fields import names_of
from quire_server.openai.http.message import HttpRequest, Reply, Response
from quire_server.openai.request_fields import describe_invalid
from quire_spec.constants import SUPERVISOR_SOCKET
from quire_spec.protocol.client import Client
from quire_spec.protocol.messages import Hello

_T = TypeVar("_T", bound=msgspec.Struct)


class LoadFields(msgspec.Struct, kw_only=True):
    """Fields of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str | dict[str, Any]
    """A folder, a hub id, a URL, or a source object as in the adapter catalog."""
    load_inplace: bool = False
    """True if the call replaces an adapter that is already loaded under this name."""


class UnloadFields(msgspec.Struct, kw_only=True):
    """Fields of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None
    """Accepted and ignored, because Quire identifies adapters by their names."""


class LoraAdapters:
    """The routes that load and unload adapters."""

    def __init__(self, run_dir: Path) -> None:
        self._socket = run_dir / SUPERVISOR_SOCKET

    async def load(self, request: HttpRequest) -> Reply:
        """POST /v1/load_lora_adapter: load an adapter. The response is sent when the adapter can serve requests, or
        when its load has failed."""
        fields = await _parse(request, LoadFields)
        check_depth(fields.lora_path, "lora_path")
        args = {"name": fields.lora_name, "location": fields.lora_path, "in_place": fields.load_inplace}
        await self._call("load_lora_adapter", args)
        return _text(f"Success: LoRA adapter '{fields.lora_name}' added successfully.")

    async def unload(self, request: HttpRequest) -> Reply:
        """POST /v1/unload_lora_adapter: unload an adapter. Requests that are already running with this adapter can
        still finish."""
        fields = await _parse(request, UnloadFields)
        await self._call("unload_lora_adapter", {"name": fields.lora_name})
        return _text(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")

    async def _call(self, method: str, args: dict[str, Any]) -> None:
        """Call the supervisor; raises QuireError if the call fails. The supervisor itself limits how long the call
        takes."""
        client = Client(self._socket, Hello("openai", pid=os.getpid()), "the supervisor")
        with contextlib.suppress(OSError):
            await client.connect()
        try:
            await client.call(method, type(None), args, timeout_s=None)
        finally:
            await client.close()


async def _parse(request: HttpRequest, fields_type: type[_T]) -> _T:
    document = await request.json_object()
    request.ignored_fields.check(document, names_of(fields_type))
    try:
        return msgspec.convert(document, fields_type)
    except msgspec.ValidationError as error:
        raise ApiError(400, describe_invalid(error)) from None


def _text(message: str) -> Response:
    return Response(message.encode(), content_type=b"text/plain; charset=utf-8")
