# SPDX-License-Identifier: Apache-2.0
"""Models are resolved to folders, and checkpoints provide the properties that scheduling needs."""

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from quire_engine.weights.checkpoint import Checkpoint, compute_fingerprint
from quire_engine.weights.hub import resolve_model
from quire_spec.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


def checkpoint(folder: Path, weights: bytes = b"w" * 300_000, **generation: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(weights)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local cache of the hub with one model, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--name"
    checkpoint(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return repository


def test_folder_is_used_directly(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), None, progress=False) == tmp_path
    with pytest.raises(ConfigError, match="revision: 'v1' was given for the folder"):
        resolve_model(str(tmp_path), "v1", progress=False)
    with pytest.raises(ConfigError, match=f"folder '{tmp_path}/none' does not exist"):
        resolve_model(f"{tmp_path}/none", None, progress=False)


def test_cached_hub_model_needs_no_network(hub_cache: Path) -> None:
    folder = resolve_model("org/name", None, progress=False)
    assert folder == next((hub_cache / "snapshots").iterdir())
    assert Checkpoint.load(folder).shape.vocab_size == 16


def test_only_weights_and_configuration_are_downloaded(tmp_path: Path) -> None:
    """Runs in a process of its own, because huggingface_hub reads its settings on import."""
    downloaded = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    ignored = ["README.md", "consolidated.safetensors", "modeling.py", "original/model.safetensors", "weights.bin"]
    commit = "0123456789abcdef0123456789abcdef01234567"

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.partition(f"/resolve/{commit}/")[2]
            reply: Any = {"id": "org/name", "sha": commit, "siblings": [{"rfilename": n} for n in downloaded + ignored]}
            if "/tree/" in self.path:
                reply = [{"type": "file", "path": n, "size": len(n), "oid": n} for n in downloaded + ignored]
            body = (name or json.dumps(reply)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{name}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            self.wfile.write(body if self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
        code = (
            "from quire_engine.weights.hub import resolve_model; print(resolve_model('org/name', None, progress=False))"
        )
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
        )
        server.shutdown()
    assert result.returncode == 0, result.stderr
    assert sorted(str(file.name) for file in Path(result.stdout.strip()).rglob("*") if file.is_file()) == downloaded


@pytest.mark.parametrize("model", ["org/other", "no such/model/at all"])
def test_error_names_a_model_that_cannot_be_downloaded(hub_cache: Path, model: str) -> None:
    with pytest.raises(ConfigError, match=f"model: '{model}' is not a folder and could not be downloaded"):
        resolve_model(model, None, progress=False)
    with pytest.raises(ConfigError, match="'org/name' at revision 'v9'"):
        resolve_model("org/name", "v9", progress=True)


@pytest.mark.parametrize(
    ("revision", "proxy", "end"),
    [
        *[(revision, "", "Connection refused") for revision in (None, "main", "0" * 40)],
        (None, "http://user:passw0rd@127.0.0.1:9", "Connection refused"),
    ],
)
def test_unreachable_hub_gives_a_one_line_error(tmp_path: Path, revision: str | None, proxy: str, end: str) -> None:
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "http_proxy": proxy}
    code = f"""
from quire_engine.weights.hub import resolve_model
from quire_spec.errors import ConfigError
try:
    resolve_model("org/name", {revision!r}, progress=False)
except ConfigError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    [line] = result.stdout.splitlines()
    assert line.startswith("model: 'org/name'") and (revision or "") in line
    assert "(http://127.0.0.1:9)" in line and line.endswith(end) and "passw0rd" not in line


@pytest.mark.parametrize(("eos", "expected"), [(None, {2}), (7, {2, 7}), ([7, 8], {2, 7, 8})])
def test_eos_tokens_of_both_files_are_used(tmp_path: Path, eos: object, expected: set[int]) -> None:
    folder = checkpoint(tmp_path / "m", eos_token_id=eos, temperature=0.6)
    assert Checkpoint.load(folder).eos_token_ids == expected


@pytest.mark.parametrize("eos", [-1, [-1, 320], 10**9])
def test_eos_tokens_outside_the_vocabulary_are_ignored(tmp_path: Path, eos: object) -> None:
    # A step that suppresses them would fail or suppress another token.
    assert Checkpoint.load(checkpoint(tmp_path / "m", eos_token_id=eos)).eos_token_ids == {2}


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}'])
def test_error_names_a_broken_generation_config(tmp_path: Path, text: str) -> None:
    folder = checkpoint(tmp_path / "m")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        Checkpoint.load(folder)


def test_fingerprints_differ_between_checkpoints(tmp_path: Path) -> None:
    base = compute_fingerprint(checkpoint(tmp_path / "a"))
    assert compute_fingerprint(checkpoint(tmp_path / "b")) == base
    assert compute_fingerprint(checkpoint(tmp_path / "c", weights=b"w" * 300_001)) != base
    assert compute_fingerprint(checkpoint(tmp_path / "d", weights=b"v" * 300_000)) != base
    short = checkpoint(tmp_path / "e", weights=b"w")
    assert compute_fingerprint(short) != base
    (short / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5e5}))
    assert compute_fingerprint(short) != compute_fingerprint(checkpoint(tmp_path / "f", weights=b"w"))


@pytest.mark.parametrize("revision", [None, COMMIT])
def test_hub_that_never_replies_times_out(hub_cache: Path, tmp_path: Path, revision: str | None) -> None:
    """The hub accepts connections but never starts TLS, like a firewall that drops packets. The cache still works."""
    code = f"""
from quire_engine.weights import hub
from quire_spec.errors import ConfigError
hub._TIMEOUT_S = 0.3
try:
    print(hub.resolve_model("org/name", {revision!r}, progress=False))
except ConfigError as error:
    print(error)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = os.environ | {
            "HF_ENDPOINT": f"https://127.0.0.1:{server.getsockname()[1]}",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        lines = []
        for cache in (hub_cache.parent, tmp_path / "empty"):
            result = subprocess.run(
                [sys.executable, "-c", code],
                env=environment | {"HF_HUB_CACHE": str(cache)},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert result.returncode == 0, result.stderr
            lines += result.stdout.splitlines()
    assert Path(lines[0]).is_relative_to(hub_cache)
    assert "handshake operation timed out" in lines[1] and lines[1].startswith("model: 'org/name'")
