# SPDX-License-Identifier: Apache-2.0
"""The requests that the documents show for the example work as they are shown."""

import json
import subprocess
import sys
import urllib.request

import pytest
from support.doc_snippets import ROOT, code_blocks, shell_commands

pytestmark = pytest.mark.server

PARAMETERS = ROOT / "docs/parameters.md"
README = ROOT / "README.md"


def requests(text):
    """Path and body of each request that curl is told to send to the HTTP port."""
    for words in shell_commands(text):
        urls = [word for word in words if word.startswith("localhost:8000/")]
        if words[0] == "curl" and urls:
            yield urls[0].removeprefix("localhost:8000"), words[words.index("-d") + 1]


def answer(service, path, body):
    """Every JSON object of the answer: one, or the events of a stream."""
    url = f"http://127.0.0.1:{service.ports['http']}{path}"
    with urllib.request.urlopen(urllib.request.Request(url, body.encode()), timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.read().decode().splitlines() if line]
    return [json.loads(line) for line in lines]


def test_requests_by_curl_are_answered(service):
    shown = [request for text in code_blocks(PARAMETERS, "sh") for request in requests(text)]
    ask_it = [text for text in code_blocks(README, "") if text.startswith("curl localhost:8000")]
    shown += [request for text in ask_it for request in requests(text)]
    assert len(shown) == 8
    for path, body in shown:
        found = answer(service, path, body)
        assert all("error" not in part and part["text_output"] is not None for part in found), found
        assert len(found) == 1 or path.endswith("_stream")


def test_answers_are_as_shown(service):
    first, second, refused = code_blocks(PARAMETERS, "json")
    asked = [next(requests(text)) for text in code_blocks(PARAMETERS, "sh")[:2]]
    for (path, body), text in zip(asked, (first, second), strict=True):
        (found,), wanted = answer(service, path, body), json.loads(text)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].startswith(value[:-3]) if value.endswith("...") else found[name] == value
    error = service.generate("tales", "Once upon a time", temperature=3000).body
    assert error == json.loads(refused)


def test_the_client_in_python_prints_a_stream(service):
    (code,) = code_blocks(PARAMETERS, "python")
    code = code.replace("localhost:8001", f"127.0.0.1:{service.ports['grpc']}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    # Names are nearly as likely as each other, and which is likelier depends on what is computed beside them.
    assert done.stdout.startswith(", there was a funny girl named ") and len(done.stdout) > 80
