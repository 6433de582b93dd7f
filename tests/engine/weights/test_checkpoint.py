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
from unittest.mock import patch

import huggingface_hub.constants
import pytest

from quire_engine.weights.checkpoint import Checkpoint
from quire_engine.weights.generation_config import load_default_sampling_params
from quire_engine.weights.hub import resolve_model
from quire_spec.documents import checkpoint_digest
from quire_spec.documents.checkpoint_digest import DIGEST_FILE, compute_digest, compute_fingerprint
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


def resolve_in_a_process(revision: str | None = None, timeout_s: float = 15.0, **environment: str) -> str:
    """Return the folder of org/name or the error. huggingface_hub reads its settings on import: hence a process."""
    code = f"""
from quire_engine.weights import hub
from quire_spec.errors import ConfigError
hub._TIMEOUT_S = {timeout_s}
try:
    print(hub.resolve_model("org/name", {revision!r}, progress=False))
except ConfigError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    [line] = result.stdout.splitlines()
    return line


def test_only_weights_and_configuration_are_downloaded(tmp_path: Path) -> None:
    downloaded = ["chat_template.jinja", "config.json", "merges.txt", "model.safetensors", "tokenizer.json"]
    downloaded = sorted([*downloaded, "hy.tiktoken", "modules.json", "tekken.json", "tokenizer.model", "vocab.json"])
    nested = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    modules = [{"type": "x.Transformer", "path": ""}, *({"type": "x", "path": p} for p in ("1_Pooling", "2_Dense"))]
    ignored = ["README.md", "consolidated.safetensors", "modeling.py", "original/model.safetensors", "weights.bin"]
    names = downloaded + nested + ignored

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.partition(f"/resolve/{COMMIT}/")[2]
            reply: Any = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
            if "/tree/" in self.path:
                reply = [{"type": "file", "path": n, "size": len(n), "oid": n} for n in names]
            body = (json.dumps(modules) if name == "modules.json" else name or json.dumps(reply)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{name}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            self.wfile.write(body if self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        folder = resolve_in_a_process(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=str(tmp_path))
        server.shutdown()
    found = [file.relative_to(folder).as_posix() for file in Path(folder).rglob("*") if file.is_file()]
    assert sorted(found) == sorted(downloaded + nested)


@pytest.mark.parametrize("model", ["org/other", "no such/model/at all"])
def test_error_names_a_model_that_cannot_be_downloaded(hub_cache: Path, model: str) -> None:
    with pytest.raises(ConfigError, match=f"model: '{model}' is not a folder and could not be downloaded"):
        resolve_model(model, None, progress=False)
    with pytest.raises(ConfigError, match="'org/name' at revision 'v9'"):
        resolve_model("org/name", "v9", progress=True)


@pytest.mark.parametrize(
    ("revision", "proxy"), [(None, "http://user:passw0rd@127.0.0.1:9"), ("main", ""), ("0" * 40, "")]
)
def test_unreachable_hub_gives_a_one_line_error(tmp_path: Path, revision: str | None, proxy: str) -> None:
    line = resolve_in_a_process(revision, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path), http_proxy=proxy)
    assert line.startswith("model: 'org/name'") and (revision or "") in line
    assert "(http://127.0.0.1:9)" in line and line.endswith("Connection refused") and "passw0rd" not in line


# Steps that suppress tokens outside the vocabulary would fail or suppress another token.
@pytest.mark.parametrize(
    ("eos", "expected"), [(None, {2}), (7, {2, 7}), ([7, 8], {2, 7, 8}), (-1, {2}), ([-1, 320], {2}), (10**9, {2})]
)
def test_eos_tokens_of_both_files_are_used_if_in_the_vocabulary(
    tmp_path: Path, eos: object, expected: set[int]
) -> None:
    folder = checkpoint(tmp_path / "m", eos_token_id=eos, temperature=0.6)
    assert Checkpoint.load(folder).eos_token_ids == expected


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


def test_digest_covers_every_byte_of_the_weights(tmp_path: Path) -> None:
    """One byte between two samples changes the digest, but not the fingerprint."""
    weights = bytearray(b"w" * 3_000_000)
    base = checkpoint(tmp_path / "a", bytes(weights))
    weights[10_000] ^= 1
    edited = checkpoint(tmp_path / "b", bytes(weights))
    assert compute_fingerprint(base) == compute_fingerprint(edited)
    digest = compute_digest(base)
    assert digest.startswith("sha256:") and len(digest) == 7 + 64
    assert compute_digest(edited) != digest
    renamed = checkpoint(tmp_path / "c", (base / "model.safetensors").read_bytes())
    (renamed / "model.safetensors").rename(renamed / "other.safetensors")
    assert compute_digest(renamed) != digest
    (base / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5e5}))
    assert compute_digest(base) != digest
    assert Checkpoint.load(base, full_digest=True).fingerprint == compute_digest(base)
    assert Checkpoint.load(base).fingerprint == compute_fingerprint(base)


def test_kept_hashes_are_used_until_a_file_changes(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    weights = folder / "model.safetensors"
    digest = compute_digest(folder)
    assert json.loads((folder / DIGEST_FILE).read_text()) == {}, "a file that has just changed can change again"
    assert compute_digest(folder, is_final=True) == digest
    with patch.object(checkpoint_digest, "file_sha256", side_effect=AssertionError("the weights are read again")):
        assert compute_digest(folder) == digest
    stat = weights.stat()
    weights.write_bytes(b"v" * 300_000)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = compute_digest(folder)
    assert changed != digest, "the same size and the same mtime, but another ctime"
    assert (folder / DIGEST_FILE).stat().st_mode & 0o777 == 0o644, "other users read the weights, too"
    (folder / DIGEST_FILE).unlink()
    assert compute_digest(folder) == changed


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"model.safetensors": 3}', b'{"model.safetensors": [1, 2, 3, "xyz"]}', b"\xff"],
)
def test_broken_file_of_kept_hashes_is_ignored(tmp_path: Path, content: bytes) -> None:
    folder = checkpoint(tmp_path / "m")
    digest = compute_digest(folder)
    (folder / DIGEST_FILE).write_bytes(content)
    assert compute_digest(folder) == digest


def test_digest_of_a_read_only_folder_and_of_a_missing_one(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    digest = compute_digest(folder)
    (folder / DIGEST_FILE).unlink()
    with patch.object(checkpoint_digest.tempfile, "mkstemp", side_effect=OSError(30, "Read-only file system")):
        assert compute_digest(folder) == digest
    assert not (folder / DIGEST_FILE).exists()
    with pytest.raises(ConfigError, match="model: "):
        compute_digest(tmp_path / "none")


@pytest.mark.parametrize("revision", [None, COMMIT])
def test_hub_that_never_replies_times_out(hub_cache: Path, tmp_path: Path, revision: str | None) -> None:
    """The hub accepts connections but never starts TLS, like a firewall that drops packets. The cache still works."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        hub = {"HF_ENDPOINT": f"https://127.0.0.1:{server.getsockname()[1]}", "HF_HUB_DISABLE_TELEMETRY": "1"}
        cached = resolve_in_a_process(revision, 0.3, **hub, HF_HUB_CACHE=str(hub_cache.parent))
        error = resolve_in_a_process(revision, 0.3, **hub, HF_HUB_CACHE=str(tmp_path / "empty"))
    assert Path(cached).is_relative_to(hub_cache)
    assert "handshake operation timed out" in error and error.startswith("model: 'org/name'")


def test_default_sampling_parameters_come_from_the_configured_source(tmp_path: Path) -> None:
    for folder, temperature in (("checkpoint", 0.25), ("other", 0.75)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "generation_config.json").write_text(json.dumps({"temperature": temperature}))
    sources = {"auto": 0.25, "vllm": 1.0, str(tmp_path / "other"): 0.75}
    for source, temperature in sources.items():
        assert load_default_sampling_params(tmp_path / "checkpoint", source).temperature == temperature
    with pytest.raises(ConfigError, match=r"generation_config: .*absent.* does not exist"):
        load_default_sampling_params(tmp_path / "checkpoint", str(tmp_path / "absent"))
