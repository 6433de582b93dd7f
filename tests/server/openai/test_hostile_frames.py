# SPDX-License-Identifier: Apache-2.0
"""A real front before a fake text process that sends frames which the front cannot accept, and requests that the front
cannot send to it."""

import subprocess
import sys
from itertools import product

import pytest
from support.engine_processes import EngineProcesses, engine_config, wait_for
from support.frontend_harness import SCRIPT
from support.hostile_frames import PAYLOADS
from support.openai_front import TINY, OpenAIFront

KINDS = ("OutputDeltas", "Reply", "GenerateRequest", "unknown")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("run")
    engine = EngineProcesses(folder, **engine_config(TINY))
    text = subprocess.Popen([sys.executable, SCRIPT, folder / "text.sock", folder / "journal"])
    wait_for((folder / "text.sock").exists, what="the fake text process")
    front = OpenAIFront(engine)
    try:
        yield front
        assert "Traceback" not in front.log_file.read_text()
    finally:
        front.close_clients()
        front.kill()
        text.kill()
        text.wait()


@pytest.mark.parametrize(("kind", "name"), list(product(KINDS, PAYLOADS)), ids=str)
def test_a_hostile_frame_ends_only_its_request(hostile: OpenAIFront, kind: str, name: str):
    with hostile.client().completions.create(model="base", prompt="step=0.01", max_tokens=8, stream=True) as stream:
        events = iter(stream)
        next(events)
        answer = hostile.complete(prompt=f"hostile={kind}:{name.replace(' ', '_')}")
        assert (answer.status, answer.body["error"]["code"]) == (500, 500), answer.body
        assert "".join(event.choices[0].text for event in events).endswith("t7 ")


def test_a_request_that_cannot_be_sent_fails_alone(hostile: OpenAIFront):
    """JSON can contain integers of more than 64 bits; the messages of the front cannot."""
    with hostile.client().completions.create(model="base", prompt="step=0.01", max_tokens=8, stream=True) as stream:
        events = iter(stream)
        next(events)
        big = 10**30
        plain = [{"role": "user", "content": "x"}]
        messages = [{**plain[0], "number": big}]
        for path, body, field in (
            ("/v1/chat/completions", {"messages": messages}, "messages"),
            ("/v1/chat/completions", {"messages": plain, "documents": [{"a": big}]}, "documents"),
            ("/tokenize", {"messages": messages}, "messages"),
            ("/detokenize", {"tokens": [big]}, "detokenize"),
        ):
            answer = hostile.request(path, {"model": "base", **body})
            assert answer.status == 400 and answer.message.startswith(f"{field}: cannot be sent"), answer.body
        assert "".join(event.choices[0].text for event in events).endswith("t7 ")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * 1_500_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 4_000_000}]}),
        ("/detokenize", {"tokens": [1000] * 1_000_000}),
        ("/v1/completions", {"prompt": [1000] * 1_000_000}),
        ("/v1/completions", {"prompt": "x" * 1_500_000}),
    ],
    ids=["text", "chat", "tokens", "prompt tokens", "prompt"],
)
def test_an_oversized_body_ends_no_other_request(front: OpenAIFront, path: str, body: dict[str, object]):
    """The real text process accepts messages of about 1.2 MB, because its model has 2,048 positions."""
    with front.client().completions.create(
        model="base", prompt="fox", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        events = iter(stream)
        next(events)
        answer = front.request(path, {"model": "base", **body})
        assert answer.status == 400 and "bytes, but max_model_len is 2048" in answer.message, answer.message
        *_, last = events
        assert last.choices[0].finish_reason == "length"
