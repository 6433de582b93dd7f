# SPDX-License-Identifier: Apache-2.0
"""`quire batch` on a server and on this machine, with adapters, kills and bad lines."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from support.engine_processes import wait_for
from support.quire_serve import EXAMPLES, example_document

pytestmark = pytest.mark.server

NUM_REQUESTS = 30
MODELS = ("tales", "pirate", "sql")


def prompt_and_model(number):
    return f"Once upon a time {number // 3 % 5}", MODELS[number % 3]


def line(custom_id, prompt, model):
    body = {"model": model, "prompt": prompt, "max_tokens": 60, "ignore_eos": True, "temperature": 0, "echo": True}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def write_requests(path):
    lines = [line(f"r{i}", *prompt_and_model(i)) for i in range(NUM_REQUESTS)]
    path.write_text("\n".join([*lines, "{", line("wrong", "x", "absent")]) + "\n")


def start(folder, *flags, env=None):
    command = [str(Path(sys.executable).with_name("quire")), "batch"]
    command += ["-i", folder / "in.jsonl", "-o", folder / "out.jsonl"]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen([*command, *flags], stderr=log, env=os.environ | (env or {}))


def num_results(folder):
    path = folder / "out.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_complete(folder, process):
    """Check the end of a batch: each line has one result, of its own prompt and model. Return those of other lines."""
    assert process.wait(120) == 3, (folder / "log").read_text()
    all_records = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    others = [record for record in all_records if record["custom_id"].startswith("/")]
    records = [record for record in all_records if record not in others]
    assert sorted(record["custom_id"] for record in records) == sorted(f"r{i}" for i in range(NUM_REQUESTS))
    texts = {}
    for record in records:
        number, body = int(record["custom_id"][1:]), record["response"]["body"]
        prompt, model = prompt_and_model(number)
        texts[number] = body["choices"][0]["text"]
        assert texts[number].startswith(prompt) and body["model"] == model
        assert body["usage"]["completion_tokens"] == 60
    assert len({texts[0], texts[1], texts[2]}) == 3, "the adapters were not used"
    errors = [json.loads(line) for line in (folder / "out.errors.jsonl").read_text().splitlines()]
    assert sorted(str(error["custom_id"]) for error in errors) == ["None", "wrong"]
    assert {e["response"]["status_code"] for e in errors if e["response"]} == {404}
    return others


def test_a_killed_batch_on_a_server_is_continued(service, tmp_path):
    write_requests(tmp_path / "in.jsonl")
    flags = [f"--url=http://127.0.0.1:{service.ports['openai']}/v1", "--max-inflight=4"]
    first = start(tmp_path, *flags)
    wait_for(lambda: num_results(tmp_path) >= 5 or first.poll() is not None, what="five results")
    first.kill()
    assert first.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    check_complete(tmp_path, start(tmp_path, *flags))
    assert "continuing after" in (tmp_path / "log").read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_cores", [1, 2])
def test_a_batch_on_this_machine_survives_the_death_of_its_core_and_its_own(tmp_path, num_cores):
    write_requests(tmp_path / "in.jsonl")
    document = example_document()
    document["spec"]["engine"]["dataParallelSize"] = num_cores
    document["spec"]["openai"] = {"chatTemplate": {"text": "{{ messages[0].content }}"}}
    (tmp_path / "llmservice.yaml").write_text(yaml.safe_dump(document))
    flags = ["-f", tmp_path / "llmservice.yaml", "--max-inflight=2", f"--run-dir={tmp_path / 'run'}"]
    flags.append(f"--cache-dir={tmp_path / 'cache'}")
    first = start(tmp_path, *flags)
    wait_for(lambda: num_results(tmp_path) >= 4 or first.poll() is not None, what="four results")
    assert first.poll() is None, (tmp_path / "log").read_text()
    children = psutil.Process(first.pid).children(recursive=True)
    cores = [child for child in children if "quire_engine.core" in child.cmdline()]
    assert len(cores) == num_cores
    cores[-1].kill()
    num_before = num_results(tmp_path)
    wait_for(lambda: num_results(tmp_path) > num_before + 4 or first.poll() is not None, what="results of a new core")
    children += psutil.Process(first.pid).children(recursive=True)
    first.kill()
    assert first.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    _, alive = psutil.wait_procs(children, 10)
    assert not alive, "processes outlive the batch"
    # Lines that are appended to the input are run, too: here the other routes.
    messages = [{"role": "user", "content": "Once upon a time"}]
    bodies = {"/v1/chat/completions": {"messages": messages}, "/v1/responses": {"input": messages}}
    with (tmp_path / "in.jsonl").open("a") as file:
        for url, body in bodies.items():
            appended = {"custom_id": url, "method": "POST", "url": url, "body": {"model": "pirate", **body}}
            print(json.dumps(appended), file=file)
    others = check_complete(tmp_path, start(tmp_path, *flags))
    assert {record["custom_id"] for record in others} == set(bodies)
    assert {record["response"]["body"]["object"] for record in others} == {"chat.completion", "response"}


def test_a_stopped_server_stops_the_batch_and_sigterm_too(tmp_path):
    write_requests(tmp_path / "in.jsonl")
    process = start(tmp_path, "--url=http://127.0.0.1:9", "--retry-timeout=1")
    assert process.wait(60) == 1
    assert "run the same command again" in (tmp_path / "log").read_text() and num_results(tmp_path) == 0
    (tmp_path / "log").unlink()
    process = start(tmp_path, "--url=http://127.0.0.1:9")
    wait_for(lambda: "continuing" in (tmp_path / "log").read_text(), what="the start")
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url=ftp://host"], "is not the URL of a server"),
        (["--url=http://user:hunter2@host"], "contains a user name"),
        (["--url=http://host", "--volume=a=/tmp"], "--volume can be used only with -f"),
        (["-f", EXAMPLES / "llmservice.yaml", "--priority=3"], "--priority can be used only with --url"),
        (["--url=http://host", "--max-inflight=0"], "is not an integer of at least 1"),
    ],
)
def test_wrong_usage_is_one_error(tmp_path, flags, message):
    write_requests(tmp_path / "in.jsonl")
    assert start(tmp_path, *flags).wait(60) == 2
    log = (tmp_path / "log").read_text()
    assert message in log and "Traceback" not in log and "hunter2" not in log
