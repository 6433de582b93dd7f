# SPDX-License-Identifier: Apache-2.0
"""Fake text process that the words of a prompt control: `fake_text_process.py SOCKET JOURNAL`.

Tests of the frontend need silence, floods, exact errors and exact deltas on demand. The fake uses the real protocol
over a real socket. Like the real process, each step sends every open request one token, in one frame per connection. It
writes a JSON line for each received message to the journal.

Words of a prompt: `step=S` seconds per step (of the whole process, until no request is open), `wait=N` steps before the
first token, `wide=N` additional characters per token, `silent`, `error=CODE`, `submit` (returns the GenerateRequest as
JSON), `flood` (all tokens at once, one delta each; with `fail=CODE` an error instead of the last), `hostile=KIND:NAME`
(a frame from hostile_frames.py; all its payloads come from there). Without one of the last five, the output is
max_tokens tokens "t0 t1 t2 ...", one per step.
"""

import asyncio
import itertools
import json
import sys
from pathlib import Path

import msgspec

from quire_spec.errors import Code
from quire_spec.protocol.messages import (
    CancelRequests,
    FieldsIgnored,
    GenerateRequest,
    OutputDelta,
    OutputDeltas,
    RequestRejected,
    TokenLogprob,
)
from quire_spec.protocol.results import ServedModels
from quire_spec.protocol.server import Server

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.hostile_frames import PAYLOADS, UNKNOWN_KIND, hostile_frame

STEP_S = 0.005


def token_deltas(request, words):
    """Yield deltas of "t0 t1 ...": one per token, or a single one without streaming."""
    padding = "." * int(words.get("wide", 0))
    params = request.params
    count = params.max_tokens or 16

    def delta(start, end):
        with_logprobs = params.logprobs is not None
        return OutputDelta(
            request.id,
            "".join(f"t{i}{padding} " for i in range(start, end)),
            list(range(start, end)),
            "length" if end == count else None,
            -0.5 * end if with_logprobs else None,
            [[TokenLogprob(i, -0.5, 1, f"t{i}")] for i in range(start, end)] if with_logprobs else None,
            len(request.prompt_token_ids or request.prompt or ""),
            end,
        )

    if not request.stream:
        yield delta(0, count)
    else:
        yield from (delta(i, i + 1) for i in range(count))


class FakeTextProcess(Server):
    def __init__(self, journal):
        super().__init__([self.models], [GenerateRequest, CancelRequests, RequestRejected, FieldsIgnored])
        self.open_requests, self.journal, self.step_s = {}, journal, STEP_S
        """By connection and id."""

    def models(self, api_key_name: str = "") -> ServedModels:
        return ServedModels("base", [], [], 2048, {}, "")

    def log(self, kind, **details):
        self.journal.write(json.dumps({"kind": kind, **details}) + "\n")
        self.journal.flush()

    def log_num_open(self):
        num_open = sum(map(len, self.open_requests.values()))
        self.step_s = self.step_s if num_open else STEP_S
        self.log("open", num=num_open)

    def on_connected(self, connection):
        self.open_requests[connection] = {}
        self.log("hello", model=connection.peer.model, pid=connection.peer.pid)

    def on_closed(self, connection):
        self.log("lost", ids=sorted(self.open_requests.pop(connection, ())))
        self.log_num_open()

    def on_request(self, connection, message):
        requests = self.open_requests[connection]
        if isinstance(message, CancelRequests):
            self.log("cancel", ids=message.ids, was_open=[i for i in message.ids if i in requests])
            for request_id in message.ids:
                requests.pop(request_id, None)
        elif isinstance(message, GenerateRequest):
            self.log("submit", id=message.id, model=message.model, num_chars=len(message.prompt or ""))
            self.start(connection, requests, message)
        self.log_num_open()

    def start(self, connection, requests, request):
        words = dict(word.partition("=")[::2] for word in (request.prompt or "").split())
        if "step" in words:
            self.step_s = float(words["step"])
        if "error" in words:
            connection.send(
                OutputDeltas([OutputDelta(request.id, error_code=Code(words["error"]), error="requested error")])
            )
        elif "submit" in words:
            text = json.dumps(msgspec.to_builtins(msgspec.structs.asdict(request)))
            delta = OutputDelta(request.id, text, [1], "stop", num_input_tokens=3, num_output_tokens=1)
            connection.send(OutputDeltas([delta]))
        elif "flood" in words:
            deltas = list(token_deltas(request, words))
            if "fail" in words:
                deltas[-1] = OutputDelta(request.id, error_code=Code(words["fail"]), error="requested error")
            connection.send(OutputDeltas(deltas))
        elif "hostile" in words:
            kind, _, name = words["hostile"].partition(":")
            frame = hostile_frame(
                UNKNOWN_KIND if kind == "unknown" else kind, [request.id], PAYLOADS[name.replace("_", " ")]
            )
            connection._transport.write(frame)
        elif "silent" in words:
            requests[request.id] = itertools.repeat(None)
        else:
            requests[request.id] = itertools.chain([None] * int(words.get("wait", 0)), token_deltas(request, words))

    def step(self, connection):
        requests = self.open_requests[connection]
        deltas = [delta for delta in map(next, requests.values()) if delta is not None]
        for delta in deltas:
            if delta.final:
                del requests[delta.id]
                self.log_num_open()
        if deltas:
            connection.send(OutputDeltas(deltas))

    async def run(self, path):
        Path(path).unlink(missing_ok=True)
        await self.listen(Path(path))
        self.log("ready")
        self.log_num_open()
        while True:
            for connection in list(self.open_requests):
                self.step(connection)
            await asyncio.sleep(self.step_s)


if __name__ == "__main__":
    with open(sys.argv[2], "a") as journal:
        asyncio.run(FakeTextProcess(journal).run(sys.argv[1]))
