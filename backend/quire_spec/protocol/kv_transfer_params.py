# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: one pod computes the prompt of a request (prefill), and another one generates the output
(decode). Pure.

A router sends a request to a prefill pod, and copies the object in its response to the request for a decode pod. The
fields have vLLM's names, so that llm-d's sidecar and vllm-router drive both calls. Blocks have keys of their content
(docs/kv-peers.md), so the object contains only where the blocks are, and what their keys begin and end with.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire_spec.engine.kv_transfer_config import PeerAddress
from quire_spec.errors import InvalidArgument

FIELD = "kv_transfer_params"
_Key = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class PromptKeys(msgspec.Struct, frozen=True):
    """The keys of the KV blocks of a prompt, as hexadecimal numbers. A pod can use the blocks of another pod only if
    both derive the same keys."""

    keys_root: _Key
    """Key of the empty prefix. It covers all that determines a block except its tokens: model, dtypes, adapter and
    salt."""
    tokens: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    """Number of tokens in full blocks."""
    digest: _Key
    """Key of the last full block, which covers all these tokens; the root if there is none."""

    def difference(self, other: "PromptKeys") -> str:
        """Return the name of the first field that differs; empty if the keys are equal."""
        names = self.__struct_fields__
        return next((name for name in names if getattr(self, name) != getattr(other, name)), "")


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """The object of a request. Further fields, which routers copy, are not read."""

    do_remote_decode: bool | None = None
    """The request is for a prefill pod."""
    do_remote_prefill: bool | None = None
    """The request is for a decode pod, which reads the blocks of the prompt from a prefill pod."""
    remote_host: str | None = None
    remote_port: int | None = None
    """Where the prefill pod serves its KV blocks."""
    quire: PromptKeys | None = None
    """Only Quire's prefill pods send it."""

    def check_role(self) -> None:
        """Raise InvalidArgument if the request has both roles."""
        if self.do_remote_decode and self.do_remote_prefill:
            raise error("do_remote_decode", "is true, and so is do_remote_prefill; a request has one of the two roles")

    def source(self) -> PeerAddress | None:
        """Return where the blocks of the prompt are; None if the request is not for a decode pod.

        Raises:
            InvalidArgument: the address is missing or not valid.
        """
        if not self.do_remote_prefill:
            return None
        for name in ("remote_host", "remote_port"):
            if getattr(self, name) is None:
                raise error(name, "missing, but do_remote_prefill is true; copy the object of the prefill response")
        host = f"[{self.remote_host}]" if ":" in str(self.remote_host) else self.remote_host
        if (peer := PeerAddress.parse(f"{host}:{self.remote_port}")) is None:
            raise error("remote_host", "and remote_port are not the address of a server")
        return peer


def error(name: str, problem: str) -> InvalidArgument:
    """Return the error of a field."""
    return InvalidArgument(f"{FIELD}.{name}: {problem}")


def response(
    engine_id: str, host: str, port: int, tensor_parallel_size: int, request_id: str, keys: PromptKeys | None
) -> dict[str, Any]:
    """Return the object of a prefill pod for the request to a decode pod. `host` and `port` are where the pod serves
    its blocks."""
    document: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        # The decode pod asks for keys, not for numbers of blocks.
        "remote_block_ids": [],
        "remote_host": host,
        "remote_port": port,
        "tp_size": tensor_parallel_size,
    }
    return document if keys is None else document | {"quire": msgspec.to_builtins(keys)}
