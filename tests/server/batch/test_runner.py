# SPDX-License-Identifier: Apache-2.0
"""Repeated requests, and files that a run must not touch."""

import asyncio
import json

import pytest
from support.batch_crashes import NoProgress, write_input

from quire_server.batch import reply as reply_module
from quire_server.batch.input_file import InputFile
from quire_server.batch.reply import Reply
from quire_server.batch.result_store import ResultStore
from quire_server.batch.runner import MAX_LOST, BatchRunner, RunnerSettings
from quire_spec.errors import ConfigError, Unavailable

OK = Reply(200, b'{"text": "x"}')


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(reply_module, "_FIRST_DELAY_S", 1e-3)
    monkeypatch.setattr(reply_module, "_MAX_DELAY_S", 2e-3)


class Scripted:
    """Answers by `script(prompt, attempt, body)` and counts attempts."""

    def __init__(self, script):
        self.script, self.attempts, self.open, self.open_with = script, {}, set(), {}

    async def post(self, url, body):
        prompt = int(body["prompt"])
        self.attempts[prompt] = self.attempts.get(prompt, 0) + 1
        self.open.add(prompt)
        self.open_with[prompt, self.attempts[prompt]] = set(self.open)
        await asyncio.sleep(1e-3)
        self.open.discard(prompt)
        return self.script(prompt, self.attempts[prompt], body)


def run(folder, script, **settings):
    write_input(folder)
    endpoint = Scripted(script)
    with (
        ResultStore(folder / "out", folder / "err", folder / "in.jsonl") as results,
        InputFile(folder / "in.jsonl", results.is_done) as requests,
    ):
        settings = RunnerSettings(**{"max_inflight": 4, **settings})
        asyncio.run(BatchRunner(endpoint, requests, results, NoProgress(), settings).run())
    return endpoint, [json.loads(line) for line in (folder / "err").read_text().splitlines()]


@pytest.mark.parametrize(
    "failure",
    [Reply(0, problem="refused", was_received=False), Reply(429), Reply(503, was_received=False), Reply(500)],
)
def test_what_can_succeed_is_repeated(tmp_path, failure):
    endpoint, errors = run(tmp_path, lambda prompt, attempt, body: OK if attempt > 3 else failure)
    assert set(endpoint.attempts.values()) == {4} and len(errors) == 2


@pytest.mark.parametrize("failure", [Reply(400), Reply(404), Reply(500, should_retry=False)])
def test_what_cannot_succeed_is_sent_once(tmp_path, failure):
    endpoint, errors = run(tmp_path, lambda prompt, attempt, body: failure if prompt == 3 else OK)
    assert endpoint.attempts[3] == 1
    assert [e["response"]["status_code"] for e in errors if e["response"]] == [failure.status]


def test_a_request_that_ends_the_engine_fails_and_others_do_not(tmp_path):
    endpoint = None

    def script(prompt, attempt, body):
        # The engine loses all requests that were open with the third one.
        return Reply(503) if prompt == 3 or 3 in endpoint.open_with[prompt, attempt] else OK

    write_input(tmp_path)
    endpoint = Scripted(script)
    with (
        ResultStore(tmp_path / "out", tmp_path / "err", tmp_path / "in.jsonl") as results,
        InputFile(tmp_path / "in.jsonl", results.is_done) as requests,
    ):
        asyncio.run(BatchRunner(endpoint, requests, results, NoProgress(), RunnerSettings(4)).run())
    errors = [json.loads(line) for line in (tmp_path / "err").read_text().splitlines()]
    assert [e["custom_id"] for e in errors if e["response"]] == ["r3"]
    assert endpoint.attempts[3] == MAX_LOST


def test_a_server_that_stays_away_stops_the_run_and_fails_no_line(tmp_path):
    away = Reply(0, problem="no connection: refused", was_received=False)
    with pytest.raises(Unavailable, match=r"refused; run the same command again"):
        run(tmp_path, lambda prompt, attempt, body: OK if prompt < 3 else away, retry_s=0.05)
    run(tmp_path, lambda prompt, attempt, body: OK)
    assert len((tmp_path / "out").read_text().splitlines()) == 12


def test_a_server_without_priorities_gets_none(tmp_path):
    rejection = Reply(400, b'{"error": {"message": "priority: got 9, but scheduling_policy is fcfs"}}')
    sent = []

    def script(prompt, attempt, body):
        sent.append(body.get("priority"))
        return rejection if "priority" in body else OK

    _, errors = run(tmp_path, script, priority=9)
    assert sent.count(9) <= 4 and sent.count(None) == 12 and len(errors) == 2


@pytest.mark.parametrize("content", [b"precious\n", b"precious", b'{"id": "other"}\n', b'{"id": "batch_req_1"\n{}\n'])
def test_other_files_are_never_changed(tmp_path, content):
    write_input(tmp_path)
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(ConfigError, match="give another file"):
        ResultStore(tmp_path / "out", tmp_path / "err", tmp_path / "in.jsonl")
    assert (tmp_path / "out").read_bytes() == content


def test_two_runs_cannot_write_one_file(tmp_path):
    write_input(tmp_path)
    with (
        ResultStore(tmp_path / "out", tmp_path / "err", tmp_path / "in.jsonl"),
        pytest.raises(ConfigError, match="another run"),
    ):
        ResultStore(tmp_path / "out", tmp_path / "err", tmp_path / "in.jsonl")
    for names in (("in.jsonl", "err"), ("out", "in.jsonl"), ("out", "out")):
        with pytest.raises(ConfigError, match=r"another file|another run"):
            ResultStore(tmp_path / names[0], tmp_path / names[1], tmp_path / "in.jsonl")
