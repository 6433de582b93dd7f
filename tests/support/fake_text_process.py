# SPDX-License-Identifier: Apache-2.0
"""Fake text process that the words of a prompt control: `fake_text_process.py SOCKET JOURNAL`.

Tests of the frontend need silence, floods, exact errors and exact deltas on demand. The fake uses the real protocol
over a real socket. Like the real process, each step sends every open request one token, in one frame per connection. It
writes a JSON line for each received message to the journal.

Words of a prompt: `step=S` seconds per step (of the whole process, until no request is open), `wait=N` steps before the
first token, `wide=N` additional characters per token, `silent`, `error=CODE`, `submit` (returns the GenerateRequest as
JSON), `flood` (all tokens at once, one delta each; with `fail=CODE` an error instead of the last). Without one of the
last four, the output is max_tokens tokens "t0 t1 t2 ...", one per step.
"""

import asyncio
import itertools
import json
import sys
from pathlib import Path

import msgspec

from quire_spec.protocol.framing import FrameDecoder, encode_frame
from quire_spec.protocol.messages import CancelRequests, GenerateRequest, Hello, OutputDelta, OutputDeltas, TokenLogprob

STEP_S = 0.005


class Connection(asyncio.Protocol):
    def __init__(self, process):
        self.process, self.decoder, self.open_requests = process, FrameDecoder(), {}

    def connection_made(self, transport):
        self.transport = transport
        self.process.connections.add(self)

    def connection_lost(self, error):
        self.process.connections.discard(self)
        self.process.log("lost", ids=sorted(self.open_requests))
        self.process.log_num_open()

    def data_received(self, data):
        for message in self.decoder.feed(data):
            match message:
                case Hello():
                    self.process.log("hello", model=message.model, pid=message.pid)
                case CancelRequests():
                    self.process.log(
                        "cancel", ids=message.ids, was_open=[i for i in message.ids if i in self.open_requests]
                    )
                    for request_id in message.ids:
                        self.open_requests.pop(request_id, None)
                    self.process.log_num_open()
                case GenerateRequest():
                    self.process.log("submit", id=message.id, model=message.model, num_chars=len(message.prompt or ""))
                    self.start(message)

    def start(self, request):
        words = dict(word.partition("=")[::2] for word in (request.prompt or "").split())
        if "step" in words:
            self.process.step_s = float(words["step"])
        if "error" in words:
            self.send([OutputDelta(request.id, error_code=words["error"], error="requested error")])
        elif "submit" in words:
            text = msgspec.json.encode(msgspec.structs.asdict(request)).decode()
            self.send([OutputDelta(request.id, text, [1], "stop", num_input_tokens=3, num_output_tokens=1)])
        elif "flood" in words:
            deltas = list(token_deltas(request, words))
            if "fail" in words:
                deltas[-1] = OutputDelta(request.id, error_code=words["fail"], error="requested error")
            self.send(deltas)
        elif "silent" in words:
            self.open_requests[request.id] = itertools.repeat(None)
        else:
            self.open_requests[request.id] = itertools.chain(
                [None] * int(words.get("wait", 0)), token_deltas(request, words)
            )
        self.process.log_num_open()

    def step(self):
        deltas = [delta for delta in map(next, self.open_requests.values()) if delta is not None]
        for delta in deltas:
            if delta.final:
                del self.open_requests[delta.id]
                self.process.log_num_open()
        if deltas:
            self.send(deltas)

    def send(self, deltas):
        self.transport.write(encode_frame(OutputDeltas(deltas)))


def token_deltas(request, words):
    """Yield deltas of "t0 t1 ...": one per token, or a single one without streaming."""
    padding = "." * int(words.get("wide", 0))
    params = request.params
    count = params.max_tokens or 16

    def delta(start, end):
        logprobs = [[TokenLogprob(i, -0.5, 1, f"t{i}")] for i in range(start, end)]
        with_logprobs = params.logprobs is not None
        return OutputDelta(
            request.id,
            "".join(f"t{i}{padding} " for i in range(start, end)),
            list(range(start, end)),
            "length" if end == count else None,
            -0.5 * end if with_logprobs else None,
            logprobs if with_logprobs else None,
            len(request.prompt_token_ids or request.prompt or ""),
            end,
        )

    if not request.stream:
        yield delta(0, count)
    else:
        yield from (delta(i, i + 1) for i in range(count))


class FakeTextProcess:
    def __init__(self, journal):
        self.connections, self.journal, self.step_s = set(), journal, STEP_S

    def log(self, kind, **details):
        self.journal.write(json.dumps({"kind": kind, **details}) + "\n")
        self.journal.flush()

    def log_num_open(self):
        num_open = sum(len(connection.open_requests) for connection in self.connections)
        self.step_s = self.step_s if num_open else STEP_S
        self.log("open", num=num_open)

    async def run(self, path):
        Path(path).unlink(missing_ok=True)
        await asyncio.get_running_loop().create_unix_server(lambda: Connection(self), path, backlog=512)
        self.log("ready")
        self.log_num_open()
        while True:
            for connection in list(self.connections):
                connection.step()
            await asyncio.sleep(self.step_s)


if __name__ == "__main__":
    with open(sys.argv[2], "a") as journal:
        asyncio.run(FakeTextProcess(journal).run(sys.argv[1]))
