# SPDX-License-Identifier: Apache-2.0
"""Other Triton models beside those of Quire, on a real server: calls of our model, states, restarts, bad input."""

import asyncio
import gzip
import json
import os
import queue
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import trustme
from support.other_models import write_plain, write_repository
from support.quire_serve import grpc_text
from support.supervisor_harness import adapter_folder, catalog, running_supervisor, started_supervisor

from quire_server.supervisor import stub_watcher

pytestmark = [pytest.mark.server, pytest.mark.timeout(180)]

KEY = "k" * 32
SECRETS = {"HF_TOKEN": "hf-secret", "AWS_SECRET_ACCESS_KEY": "aws-secret", "MY_SETTING": "7"}


@pytest.fixture(scope="module")
def pod(tmp_path_factory):
    """A supervisor with the base model, an adapter and other models; the tests leave them loaded."""
    folder = tmp_path_factory.mktemp("others")
    repository = write_repository(folder / "repository", "tales", "a")
    write_plain(repository, "broken", "raise ValueError('broken on purpose')")
    (folder / "key").write_text(KEY)
    arguments = ["http-thread-count=3", "http-header-forward-pattern=[xX]-.*", "grpc-header-forward-pattern=x-.*"]
    server = {"modelRepository": repository, "modelEnv": ["MY_SETTING"], "serverArgs": arguments}
    config = {"adminKeyFile": folder / "key", "server": server}
    documents = catalog(1, a=adapter_folder(folder / "a"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        with running_supervisor(folder / "pod", documents, config) as pod:
            pod.repository = repository
            # The ensemble needs the adapter's model, which is loaded after the base model.
            pod.wait(lambda: state(pod, "ensemble") == "Ready", 30, "ensemble ready")
            yield pod


def state(pod, name):
    return next(model["state"] for model in pod.status(KEY)["other_models"] if model["name"] == name)


def infer(pod, model, word, timeout=30, headers=()):
    """Return the answer of a model to a word over HTTP, or its error."""
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1], "data": [word]}
    body = json.dumps({"inputs": [tensor]}).encode()
    answer = post(pod, f"/v2/models/{model}/infer", body, timeout, headers)
    return answer["outputs"][0]["data"][0] if "outputs" in answer else answer["error"]


def post(pod, path, body, timeout=30, headers=()):
    url = f"http://127.0.0.1:{pod.ports['http']}{path}"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **dict(headers)})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return json.loads(error.read())


def admin(pod, name, action, body=None, key=KEY):
    return pod.request("health", f"/v2/repository/models/{name}/{action}", body or {}, key=key)


def is_ready(pod, model):
    return pod.request("http", f"/v2/models/{model}/ready").status == 200


def test_models_of_all_kinds_answer_on_one_server(pod):
    word = pod.text("tales", "x", max_tokens=1).split()[0]
    assert infer(pod, "plain", "hi") == "HI"
    assert infer(pod, "bls", "hi") == f"hi{word} {word} {word} "
    answer = pod.request("http", "/v2/models/ensemble/generate", {"x": "hi"}).body
    assert answer["y"].startswith("HI") and answer["y"].count(pod.text("a", "x", max_tokens=1).split()[-1]) == 16
    with grpcclient.InferenceServerClient(f"127.0.0.1:{pod.ports['grpc']}") as client:
        tensor = grpc_text("hi")
        tensor._input.name = "x"
        assert client.infer("bls", [tensor]).as_numpy("y")[0].decode() == f"hi{word} {word} {word} "


def test_broken_model_is_reported_and_delays_nothing(pod):
    (broken,) = (model for model in pod.status(KEY)["other_models"] if model["name"] == "broken")
    assert broken["state"] == "Failed" and "broken on purpose" in broken["error"]
    assert not is_ready(pod, "broken")
    assert pod.request("http", "/v2/health/ready").status == 200 and pod.health()[0] == 200
    assert "  failed    broken: " in pod.stdout.read_text()


def test_code_gets_no_secrets_in_its_environment(pod):
    environment = json.loads(infer(pod, "plain", "environment").swapcase())
    names = {name.upper() for name in environment}
    assert "PATH" in names and "MY_SETTING" in names
    assert not names & {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"} and "secret" not in json.dumps(environment).lower()


def test_forwarded_headers_reach_other_models_and_do_not_disturb_ours(pod):
    """The server passes headers as request parameters, and our models reject unknown parameters."""
    parameters = infer(pod, "plain", "parameters", headers={"x-user": "bob"})
    assert json.loads(parameters) == {"X-USER": "BOB"}
    results = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{pod.ports['grpc']}") as client:
        client.start_stream(lambda result, error: results.put((result, error)), headers={"x-user": "bob"})
        client.async_stream_infer("tales", [grpc_text("x")], parameters={"max_tokens": 1})
        result, error = results.get(timeout=30)
    assert error is None and result.as_numpy("text_output") is not None


def test_index_and_loading_by_name_need_the_key(pod):
    for method, path in (("GET", "index"), ("POST", "index"), ("POST", "models/plain/load")):
        answer = pod.request("health", f"/v2/repository/{path}", None if method == "GET" else {}, method=method)
        assert answer.status == 401
        assert pod.request("http", f"/v2/repository/{path}", {}, method="POST").status == 403
    for method in ("GET", "POST"):
        answer = pod.request("health", "/v2/repository/index", method=method, key=KEY)
        models = {model["name"]: model.get("state") for model in answer.body}
        ready = ("tales", "a", "plain", "bls", "ensemble")
        assert models.items() >= dict.fromkeys(ready, "READY").items() and models["broken"] == "UNAVAILABLE"


def test_models_are_loaded_and_unloaded_by_name(pod):
    """With Triton's own client, at the supervisor's port."""
    write_plain(pod.repository, "late")
    client = httpclient.InferenceServerClient(f"127.0.0.1:{pod.ports['health']}")
    headers = {"Authorization": f"Bearer {KEY}"}
    client.load_model("late", headers)
    assert infer(pod, "late", "hi") == "HI" and is_ready(pod, "late")
    write_plain(pod.repository, "late", (pod.repository / "late/1/model.py").read_text().replace("upper", "title"))
    os.utime(pod.repository / "late/1/model.py", (time.time() + 5,) * 2)
    client.load_model("late", headers)
    assert infer(pod, "late", "hi") == "Hi"
    client.unload_model("late", headers)
    assert not is_ready(pod, "late") and state(pod, "late") == "Unloaded"
    client.close()


@pytest.mark.parametrize(
    ("name", "action", "body", "status", "error"),
    [
        ("tales", "unload", {}, 400, "is the base model or an adapter"),
        ("a", "load", {}, 400, "is the base model or an adapter"),
        ("none", "load", {}, 404, "not a model of the repository"),
        ("none", "unload", {}, 404, "was never loaded"),
        ("..%2F..", "load", {}, 400, "is not a model name"),
        ("plain", "unload", {}, 400, "the ensemble 'ensemble' calls it"),
        ("plain", "unload", {"parameters": {"unload_dependents": True}}, 400, "unload_dependents: must be false"),
        ("plain", "load", {"parameters": {"file:1/model.py": "eA=="}}, 400, "'file:1/model.py' is not supported"),
        ("plain", "load", {"parameters": {"config": "{}"}}, 400, "'config' is not supported"),
        ("plain", "load", [], 400, "not a JSON object"),
        ("broken", "load", {}, 400, "broken on purpose"),
    ],
)
def test_wrong_calls_of_the_admin_port_get_one_error(pod, name, action, body, status, error):
    answer = pod.request("health", f"/v2/repository/models/{name}/{action}", body, method="POST", key=KEY)
    assert answer.status == status and error in answer.body["error"]
    assert is_ready(pod, "plain") and is_ready(pod, "tales")


def test_an_adapter_cannot_take_the_name_of_a_model(pod):
    answer = pod.request("health", "/adapters", catalog(9, plain={"source": {"path": "/a"}}), method="PUT", key=KEY)
    assert answer.status == 400 and "'plain' is a model of the model repository" in answer.body["error"]
    assert infer(pod, "plain", "hi") == "HI"


def test_compressed_requests_are_refused_before_they_are_inflated(pod):
    """Release 24.10 inflates them for such models only, and 200,000 nested arrays then end it."""
    server = pod.pid("server", KEY)
    for encoding in ("gzip", "deflate", "identity, gzip", "x"):
        body = gzip.compress(b"[" * 1_000_000)
        answer = post(pod, "/v2/models/plain/infer", body, headers={"Content-Encoding": encoding})
        assert "Content-Encoding" in answer["error"]
    answer = post(pod, "/v2/models/plain/infer", b"{}", headers={"Content-Encoding": "identity"})
    assert "Content-Encoding" not in answer["error"]
    assert infer(pod, "plain", "hi") == "HI" and pod.pid("server", KEY) == server


def test_dead_stub_is_replaced_and_disturbs_no_stream(pod):
    """Its requests end with an error of the server; its ensemble is loaded again, too."""
    server = pod.pid("server", KEY)

    async def scenario():
        streams, tasks = await pod.open_streams(["tales"] * 2, max_tokens=300)
        assert "not healthy" in await asyncio.to_thread(infer, pod, "plain", "die")
        await asyncio.gather(*tasks)
        assert [stream.error for stream in streams] == [None, None]

    asyncio.run(scenario())
    pod.wait(lambda: infer(pod, "plain", "hi") == "HI", 30, "plain answers")
    pod.wait(lambda: state(pod, "ensemble") == "Ready" and is_ready(pod, "ensemble"), 30, "ensemble ready")
    assert "y" in pod.request("http", "/v2/models/ensemble/generate", {"x": "hi"}).body
    assert pod.pid("server", KEY) == server


def test_requests_of_other_models_go_on_when_the_core_dies(pod):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(infer(pod, "plain", "sleep2")))
    thread.start()
    time.sleep(0.3)
    os.kill(pod.pid("core", KEY), signal.SIGKILL)
    pod.wait(lambda: not is_ready(pod, "ensemble"), 5, "not ready: the ensemble calls our model")
    assert is_ready(pod, "plain") and infer(pod, "bls", "x") is not None
    thread.join()
    assert answers == ["SLEEP2"]
    pod.wait(lambda: is_ready(pod, "ensemble") and pod.health()[0] == 200, 30, "ready again")


def test_models_are_loaded_again_after_a_kill_of_the_server(pod):
    os.kill(pod.pid("server", KEY), signal.SIGKILL)
    pod.wait(lambda: pod.health()[0] != 200, 10, "not ready")
    contradictions = []
    while pod.health()[0] != 200:
        if pod.request("http", "/v2/health/ready").status == 200 and infer(pod, "plain", "hi") != "HI":
            contradictions.append(time.monotonic())
        time.sleep(0.02)
    assert not contradictions and infer(pod, "plain", "hi") == "HI"
    pod.wait(lambda: state(pod, "ensemble") == "Ready", 30, "ensemble ready")
    assert "y" in pod.request("http", "/v2/models/ensemble/generate", {"x": "hi"}).body


# Starts


def start_error(folder, **server):
    """Return the last lines of a supervisor that does not start."""
    with started_supervisor(folder, catalog(1, a=adapter_folder(folder / "a")), {"server": server}) as pod:
        assert pod.process.wait(30) == 2, pod.tail()
        return pod.tail()


@pytest.mark.parametrize(
    ("folder", "error"),
    [
        ("tales", "'tales' is the name of the base model or of an adapter; rename"),
        ("a", "'a' is the name of the base model or of an adapter; rename"),
        ("two words", "'two words' is not a model name"),
        (None, "not a model repository: No such file"),
    ],
)
def test_names_that_collide_are_one_error(tmp_path, folder, error):
    (tmp_path / "pod").mkdir()
    if folder is not None:
        write_plain(tmp_path / "repository", folder)
    tail = start_error(tmp_path / "pod", modelRepository=tmp_path / "repository")
    assert "server.modelRepository: " in tail and error in tail


def test_grpc_with_tls(tmp_path):
    """The supervisor trusts the certificate itself: its names and its issuer do not matter."""
    authority, files = trustme.CA(), (tmp_path / "cert.pem", tmp_path / "key.pem")
    certificate = authority.issue_cert("*.llm.example")
    for path, blobs in zip(files, (certificate.cert_chain_pems, [certificate.private_key_pem]), strict=True):
        path.write_bytes(b"".join(blob.bytes() for blob in blobs))
    arguments = ("grpc-use-ssl=true", f"grpc-server-cert={files[0]}", f"grpc-server-key={files[1]}")
    adapters, config = catalog(1, a=adapter_folder(tmp_path / "a")), {"server": {"serverArgs": arguments}}
    with running_supervisor(tmp_path / "pod", adapters, config) as pod:
        assert "text_output" in pod.generate("a", "x", max_tokens=1).body
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        options = [("grpc.ssl_target_name_override", "a.llm.example")]
        with grpcclient.InferenceServerClient(
            f"127.0.0.1:{pod.ports['grpc']}", ssl=True, root_certificates=str(tmp_path / "ca.pem"), channel_args=options
        ) as client:
            assert client.get_model_metadata("a").name == "a"
        os.kill(pod.pid("server"), signal.SIGKILL)
        pod.wait(lambda: pod.health()[0] != 200, 10, "not ready")
        pod.wait_ready(30)


def test_missing_files_of_arguments_are_named(tmp_path):
    (tmp_path / "pod").mkdir()
    arguments = ("grpc-use-ssl=true", "grpc-server-cert=/none/cert.pem", "grpc-server-key=/none/key.pem")
    tail = start_error(tmp_path / "pod", serverArgs=arguments)
    assert "server.serverArgs: grpc-server-cert: '/none/cert.pem' cannot be read: No such file" in tail


def test_a_stub_that_ends_while_it_starts_does_not_end_the_server(tmp_path):
    write_plain(tmp_path / "repository", "exits", "import os; os._exit(3)")
    config = {"server": {"modelRepository": tmp_path / "repository"}}
    with started_supervisor(tmp_path / "pod", catalog(1), config) as pod:
        pod.wait(lambda: pod.generate("tales", "x", max_tokens=1).status == 200, 30, "answering")
        server = pod.pid("server")
        time.sleep(stub_watcher.UNKNOWN_DEATH_CONFIRMATION_S + 1)
        assert pod.pid("server") == server
        pod.kill()
