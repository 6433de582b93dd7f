# SPDX-License-Identifier: Apache-2.0
"""Discovery of the server, startup checks, its command line, and the restricted APIs of a real server."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as grpcclient
from support.frontend_harness import BASE, running_frontend, wait_until
from support.quire_serve import is_alive

from quire_server.model_server import launch
from quire_server.model_server.client import ModelServerClient
from quire_server.model_server.launch import ServerOptions
from quire_spec.errors import ConfigError, Internal, Unavailable


@pytest.fixture(scope="module")
def python():
    return launch.current_interpreter()


@pytest.fixture
def image(tmp_path):
    """Create the files of NVIDIA's image, with a stub for Python 3.12."""
    backend = tmp_path / "backends/python"
    backend.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for path in ("bin/tritonserver", "backends/python/libtriton_python.so"):
        (tmp_path / path).touch()
    (backend / "triton_python_backend_utils.py").touch()
    (backend / "triton_python_backend_stub").write_bytes(b"\x7fELF..libc.so.6\0libpython3.12.so.1.0\0")
    return tmp_path


def test_finds_the_wheel():
    install = launch.find_server(image_root=Path("/nowhere"))
    assert install.kind == "wheel"
    assert os.access(install.binary, os.X_OK)
    assert all(path.exists() for path in install.stubs.values())
    assert {"3.11", "3.12"} <= install.stubs.keys()


def test_prefers_the_image(image):
    install = launch.find_server(image)
    assert (install.kind, list(install.stubs)) == ("image", ["3.12"])
    assert install.binary == image / "bin/tritonserver"


def test_error_of_incomplete_image_names_the_missing_file(image):
    (image / "backends/python/triton_python_backend_utils.py").unlink()
    with pytest.raises(ConfigError, match=r"triton_python_backend_utils\.py' is missing"):
        launch.find_server(image)


def test_preflight_accepts_this_python(python):
    assert python.version == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert python.libpython is not None
    assert python.libpython.exists()
    launch.preflight(launch.find_server(), python, num_models=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "3.14"}, ("3.14", "3.8, 3.9, 3.10, 3.11, 3.12, 3.13")),
        ({"libpython": None}, ("libpython", "--enable-shared")),
        ({"numpy": None}, ("numpy is not installed",)),
        ({"numpy": "2.1.0"}, ("numpy 2.1.0", "numpy<2")),
        ({"executable": Path("/nowhere/python")}, ("/nowhere/python3", "missing")),
    ],
)
def test_preflight_rejects_unusable_python(python, change, words):
    with pytest.raises(ConfigError) as caught:
        launch.preflight(launch.find_server(Path("/nowhere")), replace(python, **change), num_models=1)
    assert all(word in str(caught.value) for word in words), caught.value


def test_preflight_rejects_another_python3_beside_the_interpreter(python, tmp_path):
    (tmp_path / "python").symlink_to(python.executable.resolve())
    (tmp_path / "python3").touch()
    with pytest.raises(ConfigError, match="another interpreter"):
        launch.preflight(launch.find_server(), replace(python, executable=tmp_path / "python"), num_models=1)


def test_preflight_accepts_numpy_2_with_the_image(image, python):
    launch.preflight(launch.find_server(image), replace(python, version="3.12", numpy="2.1.0"), num_models=1)


def test_preflight_requires_shared_memory_for_all_stubs(python):
    with pytest.raises(ConfigError, match=r"/dev/shm: .* MiB are required \(9999999 models x 1 MiB"):
        launch.preflight(launch.find_server(), python, num_models=9999999)


def test_command_and_environment(python, tmp_path):
    options = ServerOptions(
        tmp_path / "models",
        "tales",
        tmp_path,
        "KEY",
        "prefix-",
        http_host="::1",
        grpc_host="::1",
        metrics_host="::1",
        http_port=1,
    )
    for _ in range(2):  # the folder of a previous start already exists
        argv, env = launch.server_command(launch.find_server(), python, options)
    flags = dict(arg.removeprefix("--").split("=", 1) for arg in argv[1:] if "=" in arg)
    assert (
        flags["http-restricted-api"]
        == "model-repository,shared-memory,trace,logging:quire-server-key=$QUIRE_SERVER_KEY"
    )
    assert not any("KEY" in argument.replace("$QUIRE_SERVER_KEY", "") for argument in argv)
    assert env["QUIRE_SERVER_KEY"] == "KEY"
    assert flags["grpc-restricted-protocol"] == flags["http-restricted-api"]
    addresses = [flags[f"{kind}-address"] for kind in ("http", "grpc", "metrics")]
    assert addresses == ["ipv6:::1", "[::1]", "ipv6:::1"], "test_supervisor.py checks them with the real server"
    assert flags["load-model"] == "tales"
    backend = Path(flags["backend-directory"]) / "python"
    assert sorted(path.name for path in backend.iterdir() if path.resolve(strict=True)) == [
        "libtriton_python.so",
        "triton_python_backend_stub",
        "triton_python_backend_utils.py",
    ]
    assert env["PATH"].split(":")[0] == str(python.executable.parent)
    assert env["LD_LIBRARY_PATH"].split(":")[0] == str(python.libpython.parent)
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_clears_leftover_shared_memory(tmp_path):
    for name in ("own-1", "own-2", "other-1"):
        (tmp_path / name).touch()
    assert launch.clear_shared_memory("own-", tmp_path) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["other-1"]


CLOSED = [
    ("POST", "/v2/repository/index"),
    ("POST", f"/v2/repository/models/{BASE}/load"),
    ("POST", f"/v2/repository/models/{BASE}/unload"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("GET", "/v2/trace/setting"),
    ("GET", f"/v2/models/{BASE}/trace/setting"),
    ("GET", "/v2/logging"),
]
OPEN = ["/v2", "/v2/health/ready", f"/v2/models/{BASE}", f"/v2/models/{BASE}/config", f"/v2/models/{BASE}/stats"]


@pytest.mark.server
@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_restricted_http_apis_require_the_key(running, method, path):
    response = running.request("http", path, b"" if method == "POST" else None)
    assert response.status == 403, response
    assert running.generate(BASE, "x").status == 200


@pytest.mark.server
def test_no_other_user_and_no_stub_can_read_the_key(running):
    server = psutil.Process(running.process.pid)
    for process in [server, *server.children(recursive=True)]:
        assert running.key not in " ".join(process.cmdline())
        assert process.pid == server.pid or running.key not in process.environ().values()
    assert running.key not in running.log.read_text()


@pytest.mark.server
@pytest.mark.parametrize("path", OPEN)
def test_http_apis_of_load_tools_are_open(running, path):
    assert running.request("http", path).status == 200


@pytest.mark.server
def test_listens_on_loopback_only(running):
    listeners = [c for c in psutil.Process(running.process.pid).net_connections("inet") if c.status == "LISTEN"]
    assert {c.laddr.port for c in listeners} == set(running.ports.values())
    assert {c.laddr.ip.removeprefix("::ffff:") for c in listeners} == {"127.0.0.1"}


@pytest.mark.server
def test_restricted_grpc_protocols_require_the_key(running):
    calls = [
        lambda client, **kw: client.get_model_repository_index(**kw),
        lambda client, **kw: client.load_model(BASE, **kw),
        lambda client, **kw: client.unload_model("unknown", **kw),
        lambda client, **kw: client.get_system_shared_memory_status(**kw),
        lambda client, **kw: client.get_cuda_shared_memory_status(**kw),
        lambda client, **kw: client.get_trace_settings(**kw),
        lambda client, **kw: client.get_log_settings(**kw),
    ]
    with grpcclient.InferenceServerClient(f"127.0.0.1:{running.ports['grpc']}") as client:
        for call in calls:
            for headers in (None, {launch.GRPC_KEY_HEADER: "wrong"}, {launch.KEY_HEADER: running.key}):
                with pytest.raises(grpcclient.InferenceServerException, match="restricted"):
                    call(client, headers=headers)
        for call in calls:
            call(client, headers={launch.GRPC_KEY_HEADER: running.key})
        assert client.get_model_metadata(BASE).name == BASE
        assert client.get_model_config(BASE).config.model_transaction_policy.decoupled
        assert client.get_inference_statistics(BASE).model_stats
        assert client.is_server_ready()


@pytest.mark.server
async def test_client_with_the_key_loads_and_unloads(running):
    running.write_model("keyed")
    async with ModelServerClient(
        ("127.0.0.1", running.ports["http"]), ("127.0.0.1", running.ports["grpc"]), "wrong"
    ) as client:
        with pytest.raises(Unavailable, match="restricted"):
            await client.load_model("keyed")
    async with running.client() as client:
        assert await client.is_live()
        assert not await client.is_loaded("keyed")
        await client.load_model("keyed")
        assert await client.is_loaded("keyed")
        response = await asyncio.to_thread(running.generate, "keyed", "submit", exclude_input_in_output=True)
        assert '"model": "keyed"' in response.body["text_output"]
        await client.unload_model("keyed")
        assert not await client.is_loaded("keyed")
        with pytest.raises(Internal, match="failed to load"):
            await client.load_model("none")


@pytest.mark.server
async def test_client_ignores_proxies(running, unused_tcp_port, monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{unused_tcp_port}")
    async with running.client() as client:
        await client.load_model(running.write_model("near"))
        assert await client.is_loaded("near")
        await client.unload_model("near")


async def test_missing_server_is_unavailable(unused_tcp_port):
    async with ModelServerClient(("127.0.0.1", unused_tcp_port), ("127.0.0.1", unused_tcp_port), "key") as client:
        assert not await client.is_live()
        with pytest.raises(Unavailable):
            await client.unload_model("sql")


@pytest.mark.server
def test_stubs_exit_after_the_server_is_killed(tmp_path):
    with running_frontend(tmp_path) as frontend:
        frontend.add_model("sql")
        stubs = frontend.child_processes()
        assert len(stubs) == 2
        os.kill(frontend.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(is_alive(stub) for stub in stubs), 20, "without stubs")
        frontend.process.wait()
        assert launch.clear_shared_memory(frontend.shm_prefix) == 2
