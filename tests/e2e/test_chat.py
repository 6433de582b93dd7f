# SPDX-License-Identifier: Apache-2.0
"""`quire chat` against a real server: in a terminal, with --once, through a pipe, and with a server of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from support.browser import requires_chromium, running_browser
from support.engine_processes import wait_for
from support.openai_front import running_front
from support.quire_serve import EXAMPLES, ROOT
from support.terminal import CTRL_C, CTRL_D, TAB, UP, running_terminal

pytestmark = pytest.mark.server

QUIRE = Path(sys.executable).with_name("quire")
TALE = "Tell a long story"


@pytest.fixture
def environment(tmp_path):
    """Return an environment with a state folder of its own, and without settings of the user."""
    kept = {name: value for name, value in os.environ.items() if name not in ("QUIRE_API_KEY", "NO_COLOR")}
    return kept | {"XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm"}


@pytest.fixture
def url(service):
    return f"http://127.0.0.1:{service.ports['openai']}"


def chat(environment, *arguments, stdin=None):
    source = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    command = [QUIRE, "chat", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False, **source)


def expected(service, model, *messages, **parameters):
    body = {"model": model, "messages": messages, "temperature": 0, **parameters}
    response = service.request("openai", "/v1/chat/completions", body)
    assert response.status == 200, response
    return response.body["choices"][0]["message"]["content"]


def user(text):
    return {"role": "user", "content": text}


def history(environment):
    return Path(environment["XDG_STATE_HOME"], "quire", "chat-history")


def lines_of(text):
    """Return what a terminal shows of an answer: its lines without the escape sequences of the line editor."""
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text).replace("\r\n", "\n").strip("\n\r")


def test_a_chat_in_a_terminal(service, url, environment):
    flags = [url, "--temperature", "0", "--max-tokens", "24"]
    with running_terminal([QUIRE, "chat", *flags], environment) as terminal:
        terminal.wait_for("tales on ")
        terminal.wait_for(">>> ")
        terminal.enter("Hello")
        terminal.wait_for("Hello\r\n")
        first = expected(service, "tales", user("Hello"), max_tokens=24)
        assert first.strip() in lines_of(terminal.wait_for(">>> "))
        terminal.enter("And then?")
        terminal.wait_for("And then?\r\n")
        turns = user("Hello"), {"role": "assistant", "content": first}, user("And then?")
        second = expected(service, "tales", *turns, max_tokens=24)
        assert second.strip() in lines_of(terminal.wait_for(">>> ")), "the history was not sent"
        terminal.enter("/models")
        listed = lines_of(terminal.wait_for(">>> ")).splitlines()[1:]
        assert [line.strip() for line in listed] == ["* tales", "pirate", "sql", "tools"]
        terminal.type(f"/model pi{TAB}")
        terminal.wait_for("rate")
        terminal.enter("")
        terminal.wait_for(">>> ")
        terminal.enter("/clear")
        terminal.wait_for(">>> ")
        terminal.enter("/system Be brief")
        terminal.wait_for(">>> ")
        terminal.type(UP * 5)  # past /system, /clear, /model and /models
        terminal.wait_for("And then?")
        terminal.type(UP)
        terminal.wait_for("Hello")
        terminal.enter("")
        terminal.wait_for("\r\n")
        system = {"role": "system", "content": "Be brief"}
        answer = expected(service, "pirate", system, user("Hello"), max_tokens=24)
        assert answer.strip() in lines_of(terminal.wait_for(">>> ")) and answer != first
        terminal.enter("/modle x")
        terminal.wait_for("did you mean /model")
        terminal.wait_for(">>> ")
        terminal.enter("/model absent")
        terminal.wait_for("absent is not in the list")
        terminal.wait_for(">>> ")
        terminal.enter("Hello")
        terminal.wait_for("(status 404)")
        terminal.wait_for(">>> ")
        terminal.type(CTRL_D)
        assert terminal.wait_end() == 0
    path = history(environment)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert "And then?" in path.read_text().splitlines()
    with running_terminal([QUIRE, "chat", *flags], environment) as terminal:
        terminal.wait_for(">>> ")
        terminal.type(UP * 4)  # past Hello, /model absent and /modle x
        terminal.wait_for("Hello", 10)
        terminal.enter("")
        terminal.wait_for(">>> ")
        terminal.enter("/exit")
        assert terminal.wait_end() == 0


def test_ctrl_c_stops_the_answer_and_only_the_answer(service, url, environment):
    # The model must not end its answer by itself. Only the start of a context length of tokens is waited for.
    with running_terminal([QUIRE, "chat", url, "--temperature", "2", "--max-tokens", "2000"], environment) as terminal:
        terminal.wait_for(">>> ")
        for _ in range(20):
            terminal.enter(TALE)
            terminal.wait_for(TALE + "\r\n")
            terminal.type(CTRL_C)
            if "(stopped)" in terminal.wait_for(">>> "):
                break
        else:
            raise AssertionError("no answer was stopped")

        def is_idle():
            return re.search(r"^vllm:num_requests_running\S* 0(\.0)?$", service.metrics(), re.MULTILINE)

        wait_for(is_idle, what="the end of the request")
        terminal.type("half of a line" + CTRL_C)
        terminal.wait_for("Ctrl-D or /exit leaves")
        terminal.wait_for(">>> ")
        terminal.enter("/model")
        terminal.wait_for("tales")
        terminal.wait_for(">>> ")
        terminal.type(CTRL_D)
        assert terminal.wait_end() == 0


def test_once_and_a_pipe_print_the_answer_alone(service, url, environment):
    flags = [url, "--temperature", "0", "--max-tokens", "16"]
    answer = expected(service, "sql", user("Hello"), max_tokens=16)
    done = chat(environment, *flags, "--model", "sql", "--once", "Hello")
    assert (done.returncode, done.stdout) == (0, answer.removesuffix("\n") + "\n"), done.stderr
    piped = chat(environment, *flags, "--model=sql", stdin="Hello\n")
    assert (piped.returncode, piped.stdout) == (0, done.stdout)
    assert not history(environment).exists()


@pytest.mark.parametrize(
    ("flags", "stdin", "code", "message"),
    [
        (["--once", "x", "--model", "absent"], None, 1, "(status 404)"),
        (["--once", "x", "--temperature", "-1"], None, 2, "is not a temperature"),
        (["--once", "x", "--lora", "a=b"], None, 2, "--lora and --device require MODEL"),
        ([], "", 2, "the prompt is empty"),
    ],
)
def test_a_failure_is_one_message_and_a_status(url, environment, flags, stdin, code, message):
    done = chat(environment, url, *flags, stdin=stdin)
    assert (done.returncode, done.stdout) == (code, "") and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9: no connection: Connection refused"),
        ("ftp://host", "is not the URL of a server"),
        ("http://user:hunter2@host", "contains a user name"),
        ("http://[::1", "is not the URL of a server"),
    ],
)
def test_a_wrong_server_is_one_message(environment, target, message):
    done = chat(environment, target, "--once", "x")
    assert (done.returncode, done.stdout) == (1, "") and message in done.stderr
    assert len(done.stderr.splitlines()) == 1 and "hunter2" not in done.stderr


def test_a_page_that_is_no_server_of_the_api_is_named(service, environment):
    done = chat(environment, f"http://127.0.0.1:{service.ports['health']}/health/ready?", "--once", "x")
    assert done.returncode == 1 and "is not the URL of a server" in done.stderr
    done = chat(environment, f"http://127.0.0.1:{service.ports['health']}", "--once", "x")
    assert done.returncode == 1 and "name one with --model" in done.stderr


def test_keys_are_sent_and_asked_for(environment, tmp_path):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "alice").write_text("sk-alice")
    settings = {"apiKeysDir": tmp_path / "keys"}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_front(Path(folder), settings, reasoning_parser="deepseek_r1") as front,
    ):
        flags = [front.url, "--max-tokens", "8", "--once", "Hello"]
        denied = chat(environment, *flags)
        assert denied.returncode == 1 and "QUIRE_API_KEY" in denied.stderr
        assert chat(environment, *flags, "--api-key", "sk-alice").returncode == 0
        environment = environment | {"QUIRE_API_KEY": "sk-alice"}
        # Everything that this model says before </think> is thinking: it is dimmed in a terminal, not in a pipe.
        done = chat(environment, *flags)
        assert done.returncode == 0 and done.stdout == "" and "limit of tokens" in done.stderr
        with running_terminal([QUIRE, "chat", *flags], environment) as terminal:
            assert terminal.wait_end() == 0
        assert re.search(r"\x1b\[2m[^\x1b]+\x1b\[0m", terminal.screen)


def test_a_model_gets_a_server_of_its_own(environment):
    flags = ["--temperature=0", "--max-tokens=16", "--once=Hello", "--device=cpu"]
    lora = f"--lora=corsair={EXAMPLES / 'adapters/pirate'}"
    done = chat(environment, str(EXAMPLES / "models/tiny"), *flags, lora, "--model=corsair")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert "starting quire serve" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_its_server_ends_with_the_chat(environment, number):
    # The path must be short, because it contains sockets.
    with (
        tempfile.TemporaryDirectory() as folder,
        running_terminal(
            [QUIRE, "chat", str(ROOT / "examples/llmservice.yaml")], environment | {"TMPDIR": folder}
        ) as terminal,
    ):
        terminal.wait_for(">>> ", 120)
        assert "tales on http://127.0.0.1:" in terminal.screen
        chat_process = psutil.Process(terminal.process.pid)
        servers = chat_process.children(recursive=True)
        assert len(servers) > 4
        chat_process.send_signal(number)
        assert terminal.wait_end() == (128 + number if number == signal.SIGTERM else -number)
        _, alive = psutil.wait_procs(servers, 30)
        assert not alive, alive
        assert number == signal.SIGKILL or os.listdir(folder) == []


def test_a_model_that_does_not_start_shows_why(environment, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    done = chat(environment, str(tmp_path), "--once", "x")
    assert (done.returncode, done.stdout) == (1, "") and "quire serve did not start" in done.stderr
    assert "NoSuchModel" in done.stderr or "has no tokenizer" in done.stderr


@requires_chromium
def test_the_page_talks_to_an_adapter(service, url, tmp_path):
    with running_browser(tmp_path) as browser:
        browser.open(f"{url}/live")
        browser.wait("document.getElementById('models').length", "the models")
        names = "return [...document.getElementById('models').options].map((option) => option.value)"
        assert browser.run(names) == ["tales", "pirate", "sql", "tools"]
        for name, value in (("models", "pirate"), ("max-tokens", 24), ("temperature", 0)):
            browser.run("document.getElementById(arguments[0]).value = arguments[1]", name, value)
        browser.run("document.getElementById('prompt').focus()")
        browser.type("Hello")
        browser.press("Enter")
        browser.wait("!answering && document.querySelector('.assistant')", "an answer")
        answer = browser.run("return document.querySelector('.assistant .body').textContent")
        # The page leaves the newlines at the end of a text out.
        assert answer == expected(service, "pirate", user("Hello"), max_tokens=24).rstrip("\n")
        assert browser.run("return document.querySelector('.who').textContent") == "pirate"
        assert browser.problems() == []
