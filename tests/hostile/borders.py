# SPDX-License-Identifier: Apache-2.0
"""Keys, paths, the live page, the prefix cache between tenants, and other users of the machine."""

import asyncio
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attack import Attack, Target

PATHS = ("/v1/models", "/v1/completions", "/tokenize", "/live/events")
SPELLINGS = (
    *("{}", "{}/", "/{}", "/health/..{}", "/health;{}", "{}%2f", "{}?key=x", "{}%00", "//localhost{}", "/./{}"),
)
NOBODY = 65534
NUM_FRESH_SALTS = 4


def keys_and_paths() -> Iterator[Attack]:
    """No spelling of a path or of a key opens a route."""
    for path in PATHS:
        for spelling in SPELLINGS:
            yield _closed(f"path {spelling.format(path)}", spelling.format(path), {})
    for name, value in {
        "empty": "",
        "scheme": "Bearer",
        "space": "Bearer ",
        "wrong": "Bearer wrong",
        "basic": "Basic Ym9iOmtleQ==",
        "prefix": "Bearer k",
        "long": "Bearer " + "x" * 60_000,
        "name": "Bearer bob",
        "null": "Bearer null",
        "comma": "Bearer a, Bearer b",
    }.items():
        yield _closed(f"key {name}", "/v1/models", {"Authorization": value})
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "CONNECT"):
        yield _closed(f"method {method}", "/v1/models", {}, method)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        yield Attack("keys and paths", f"API key for {path}", partial(_api_key_for_admin, path=path))


async def _api_key_for_admin(target: Target, path: str) -> str:
    answer = await target.post(path, {"lora_name": "x", "lora_path": "/x"})
    return answer if answer.startswith("401") else f"wrong: {answer}"


def _closed(name: str, path: str, headers: dict[str, str], method: str | None = None) -> Attack:
    async def send(target: Target) -> str:
        answer = await target.request("openai", path, method=method, headers=headers)
        return f"wrong: open: {answer}" if answer.startswith("2") else answer

    return Attack("keys and paths", name, send)


def live() -> Iterator[Attack]:
    """Names with HTML do not reach a page unescaped; foreign pages cannot use the health port."""
    for name in ("<script>", '"><img src=x>', "a\nb", 'x"} 1\nfake_metric{a="', "\\", "\u2028", "a" * 5000):
        yield Attack("live page and metrics", f"model {name[:10]!r}", partial(_unknown_model, name=name))
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "[::2]", ""):
        for path in ("/status", "/metrics"):
            yield Attack("live page and metrics", f"host {host} {path}", partial(_foreign_host, host=host, path=path))
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        yield Attack("live page and metrics", f"form {kind}", partial(_form, kind=kind))


async def _unknown_model(target: Target, name: str) -> str:
    answer = await target.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1})
    page = await target.request("openai", "/metrics", max_chars=10**7)
    return f"wrong: the metrics contain {name!r}" if name in page and len(name) > 1 else answer


async def _foreign_host(target: Target, host: str, path: str) -> str:
    answer = await target.request("health", path, headers={"Host": host})
    return f"wrong: served: {answer[:60]}" if answer.startswith("200") and path == "/status" else answer


async def _form(target: Target, kind: str) -> str:
    answer = await target.request("health", "/adapters", b"{}", "PUT", {"Content-Type": kind, "Origin": "http://evil"})
    return f"wrong: accepted: {answer[:60]}" if answer.startswith("2") else answer


def prefix_cache() -> Iterator[Attack]:
    """A client of the server's port guesses the salt of a key, and measures whether a prompt is cached."""
    for i in range(6):
        yield Attack("prefix cache", f"guess of the server's port {i}", partial(_guess, i=i), limit_s=30.0)
        yield Attack("prefix cache", f"the other key {i}", partial(_other_key, i=i), limit_s=30.0)


def _prompt(i: int, name: str) -> str:
    return f"The secret of {name} number {i}: " + "the quick brown fox jumps over the lazy dog. " * 12


async def _cached_tokens(target: Target, prompt: str, key: str, salt: str | None = None) -> int:
    body = {"model": "tales", "prompt": prompt, "max_tokens": 1} | ({"cache_salt": salt} if salt else {})
    answer = await target.request("openai", "/v1/completions", body, headers=target.headers(key), max_chars=10**6)
    document = json.loads(answer[4:])
    return int(document["usage"]["prompt_tokens_details"]["cached_tokens"])


async def _other_key(target: Target, i: int) -> str:
    await _cached_tokens(target, _prompt(i, "key"), target.key)
    num_cached = await _cached_tokens(target, _prompt(i, "key"), target.other_key)
    return f"wrong: {num_cached} cached tokens of another key" if num_cached else "200"


async def _guess(target: Target, i: int) -> str:
    """The time of the guess is compared with the times of the same prompt under fresh salts."""
    await _cached_tokens(target, _prompt(i, "guess"), target.key)
    times = []
    for salt in (hashlib.sha256(b"bob/").hexdigest(), *(os.urandom(8).hex() for _ in range(NUM_FRESH_SALTS))):
        body = {"text_input": _prompt(i, "guess"), "max_tokens": 1, "cache_salt": salt}
        started = asyncio.get_running_loop().time()
        answer = await target.request("http", "/v2/models/tales/generate", body, headers={})
        times.append(asyncio.get_running_loop().time() - started)
        if not answer.startswith("200"):
            return answer
    # A cached prompt takes a small part of the time. Other attacks delay single requests, so the fastest counts.
    guess, fresh = times[0], min(times[1:])
    return f"wrong: the guess took {guess:.3f} s instead of {fresh:.3f} s" if 5 * guess < fresh else "200"


def local_user() -> Iterator[Attack]:
    """Another user of the machine reads no key, no prompt and no socket."""
    for name, script in {
        "command lines": "tr '\\0' ' ' < /proc/{pid}/cmdline | grep -E 'key=[0-9a-f]{{16}}'",
        "environment": "cat /proc/{pid}/environ",
        "memory": "head -c 1 /proc/{pid}/mem",
        "shared memory": "cat /dev/shm/{shm}*",
        "run folder": "ls {run}",
        "text socket": "ls {run}/text.sock",
        "core socket": "ls {run}/core.sock",
        "salts": "cat {run}/cache-salt-secret",
        "prefix of shared memory": "cat {run}/shm-prefix",
        "repository": "ls {run}/repository",
    }.items():
        yield Attack("local user", name, partial(_as_nobody, script=script))


async def _as_nobody(target: Target, script: str) -> str:
    if os.geteuid() != 0:
        return "403 only root can become another user"
    for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if str(target.folder.parent).encode() not in command or b"tests/hostile" in command:
            continue
        run_dir = target.folder.parent / "run"
        shell = script.format(pid=pid, run=run_dir, shm=(run_dir / "shm-prefix").read_text())
        result = await asyncio.to_thread(
            subprocess.run, ["sh", "-c", shell], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True
        )
        if result.stdout.strip():
            return f"wrong: {result.stdout[:100]!r}"
    return "403"
