# SPDX-License-Identifier: Apache-2.0
"""The requests in the documentation work for the example and return the documented responses."""

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
    """Yield path and body of each curl request to the HTTP port."""
    for words in shell_commands(text):
        urls = [word for word in words if word.startswith("localhost:8000/")]
        if words[0] == "curl" and urls:
            yield urls[0].removeprefix("localhost:8000"), words[words.index("-d") + 1]


def send(service, path, body):
    """Return the JSON objects of the response: one, or the events of a stream."""
    url = f"http://127.0.0.1:{service.ports['http']}{path}"
    with urllib.request.urlopen(urllib.request.Request(url, body.encode()), timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.read().decode().splitlines() if line]
    return [json.loads(line) for line in lines]


def test_documented_curl_requests_work(service):
    documented = [request for text in code_blocks(PARAMETERS, "sh") for request in requests(text)]
    readme_blocks = [text for text in code_blocks(README, "") if text.startswith("curl localhost:8000")]
    documented += [request for text in readme_blocks for request in requests(text)]
    assert len(documented) == 9
    for path, body in documented:
        events = send(service, path, body)
        assert all("error" not in event and event["text_output"] is not None for event in events), events
        assert len(events) == 1 or path.endswith("_stream")


def test_responses_match_the_documentation(service):
    first, second, rejected = code_blocks(PARAMETERS, "json")
    documented = [next(requests(text)) for text in code_blocks(PARAMETERS, "sh")[:2]]
    for (path, body), text in zip(documented, (first, second), strict=True):
        (response,), expected = send(service, path, body), json.loads(text)
        assert response.keys() == expected.keys()
        for name, value in expected.items():
            assert response[name].startswith(value[:-3]) if value.endswith("...") else response[name] == value
    error = service.generate("tales", "Once upon a time", temperature=3000).body
    assert error == json.loads(rejected)


def test_documented_python_client_prints_a_stream(service):
    code, offline_code = code_blocks(PARAMETERS, "python")
    code = code.replace("localhost:8001", f"127.0.0.1:{service.ports['grpc']}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    # Names have nearly equal probabilities, and the most likely one depends on the rest of the batch.
    assert done.stdout.startswith(", there was a funny boy named ") and len(done.stdout) > 80
    command = [sys.executable, "-c", offline_code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and float(done.stdout.split()[-1]) < 0, done.stderr
