# SPDX-License-Identifier: Apache-2.0
"""Clients of the real server, in a process of their own: HTTP generate_stream and gRPC ModelStreamInfer, asyncio.

They share the processor with what they measure; that is part of what "through the server" costs here.
"""

import asyncio
import json
import sys
from typing import Any

import aiohttp
import child
import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
from record import Record


class Clients:
    """`settings`: model, and the ports http and grpc."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def run(self, requests: list[tuple[list[int], int]], offsets: list[float] | None, via: str) -> dict[str, Any]:
        """See measure.py; `via` http or grpc, every request on a stream of its own."""
        return asyncio.run(self._run(requests, offsets or [0.0] * len(requests), via))

    async def _run(self, requests: list[tuple[list[int], int]], offsets: list[float], via: str) -> dict[str, Any]:
        address, ask = f"127.0.0.1:{self._settings[via]}", {"http": self._http, "grpc": self._grpc}[via]
        if via == "http":
            client: Any = aiohttp.ClientSession(f"http://{address}", connector=aiohttp.TCPConnector(limit=0))
        else:
            client = grpcaio.InferenceServerClient(address)

        async def one(i: int) -> None:
            await asyncio.sleep(offsets[i] - record.now())
            await ask(client, i, *requests[i], record)

        async with client:
            record = Record()
            await asyncio.gather(*(one(i) for i in range(len(requests))))
        return record.reply()

    async def _http(self, client: Any, i: int, prompt: list[int], num_tokens: int, record: Record) -> None:
        body = {"input_ids": prompt, "stream": True, "return_output_ids": True, **_parameters(num_tokens, "http")}
        async with client.post(f"/v2/models/{self._settings['model']}/generate_stream", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(f"request {i}: {event['error']}")
                    found = event["output_ids"]  # the server writes a list of one as its only element
                    record.take(i, found if isinstance(found, list) else [found])

    async def _grpc(self, client: Any, i: int, prompt: list[int], num_tokens: int, record: Record) -> None:
        async def ask() -> Any:
            tensors = [
                ("input_ids", "INT64", prompt),
                ("stream", "BOOL", [True]),
                ("return_output_ids", "BOOL", [True]),
            ]
            yield {
                "model_name": self._settings["model"],
                "inputs": [_tensor(*tensor) for tensor in tensors],
                "parameters": _parameters(num_tokens, "grpc"),
                "enable_empty_final_response": True,
            }

        async for result, error in client.stream_infer(ask(), headers={"triton_grpc_error": "true"}):
            if error is not None:
                raise RuntimeError(f"request {i}: {error}")
            if (found := result.as_numpy("output_ids")) is not None:
                record.take(i, found.tolist())
            if result.get_response().parameters["triton_final_response"].bool_param:
                return


def _parameters(num_tokens: int, via: str) -> dict[str, Any]:
    # The salt keeps the prompts that both send out of each other's prefix cache.
    return {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "cache_salt": via}


def _tensor(name: str, kind: str, values: list[Any]) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [len(values)], kind)
    tensor.set_data_from_numpy(np.array(values, {"INT64": np.int64, "BOOL": np.bool_}[kind]))
    return tensor


if __name__ == "__main__":
    clients = Clients(json.loads(sys.argv[1]))
    child.serve(child.take_stdout(), run=clients.run)
