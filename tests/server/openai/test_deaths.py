# SPDX-License-Identifier: Apache-2.0
"""Deaths of the processes around the front, and its own end, with open streams."""

import json
import threading
import time

import openai
import pytest
from support.engine_processes import wait_for
from support.openai_front import running_front

pytestmark = pytest.mark.timeout(180)

LONG = {"model": "base", "prompt": "Once upon a time", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}


class OpenStream:
    """A stream that a thread reads until it ends."""

    def __init__(self, front):
        self.events, self.error, self.ended_at = [], None, 0.0
        self._thread = threading.Thread(target=self._read, args=(front,))
        self._thread.start()
        wait_for(lambda: self.events, what="a first event")

    def _read(self, front):
        try:
            create = front.client().completions.with_streaming_response.create
            with create(stream=True, **LONG) as response:
                for line in filter(None, response.iter_lines()):
                    self.events.append(line)
        except Exception as error:
            self.error = error
        self.ended_at = time.monotonic()

    def join(self):
        self._thread.join(20)
        assert self.ended_at, "the stream has not ended"
        return self


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    with running_front(tmp_path_factory.mktemp("deaths")) as front:
        yield front


@pytest.mark.parametrize("victim", ["text", "core"])
def test_a_death_in_the_engine_ends_streams_with_an_error_event(own, victim):
    stream = OpenStream(own)
    killed = time.monotonic()
    own.engine.kill(victim)
    stream.join()
    assert stream.error is None and stream.ended_at - killed < 10
    assert stream.events[-1] == "data: [DONE]"
    error = json.loads(stream.events[-2].removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    answer = own.complete(prompt="a")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert own.request("/health").status == 503 and own.request("/version").status == 200
    own.engine.start(victim)
    own.engine.wait_core_connected(True)
    wait_for(lambda: own.complete(prompt="a", max_tokens=1).status == 200, what="an answer")


def test_the_client_raises_the_error_of_a_stream(own):
    with own.client() as client, pytest.raises(openai.APIError, match="restarting"):
        for _ in client.completions.create(stream=True, **LONG):
            if own.engine.processes["core"].poll() is None:
                own.engine.kill("core")
    own.engine.start("core")
    own.engine.wait_core_connected(True)


def test_a_killed_front_leaves_no_request_in_the_engine(own):
    stream = OpenStream(own)
    own.kill()
    assert stream.join().error is not None
    own.engine.wait_idle()
    own.start()
    assert own.complete(prompt="a", max_tokens=1).status == 200


def test_sigterm_ends_the_front_within_its_grace_period(own):
    stream = OpenStream(own)
    started = time.monotonic()
    assert own.stop() == 0
    assert time.monotonic() - started < 30
    stream.join()
    own.engine.wait_idle()
    own.start()
