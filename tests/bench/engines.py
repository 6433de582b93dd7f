# SPDX-License-Identifier: Apache-2.0
"""The engines under test, each in its own processes, and the checks of their output."""

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from child import ChildProcess
from measure import MAX_GAP, WrongOutput
from workload import Request

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "hack")]

from support.quire_serve import QuireServeProcess  # noqa: E402

ENGINE_NAMES = ("offline", "http", "grpc", "openai", "transformers", "vllm", "vllm-serve", "openvino")
PROTOCOLS = ("http", "grpc", "openai")
PEERS = {"vllm": "vllm", "vllm-serve": "vllm", "openvino": "openvino"}
"""Engines that run in another environment, and the option that names its interpreter, without `-python`."""
ENGINES_WITH_RATES = (*PROTOCOLS, "vllm", "vllm-serve")
"""Engines that accept requests while others run."""
STATIC_BATCH = 16


@dataclass(frozen=True, slots=True)
class BenchmarkEngine:
    """One engine under test."""

    name: str
    child: ChildProcess
    run_arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of its `run` command."""
    service: QuireServeProcess | None = None
    """The server behind it, for the protocols."""

    def about(self) -> dict[str, Any]:
        """Return the engine's description of itself, after loading."""
        return self.service.status()["memory"] if self.service else self.child.call("about")

    def run(self, requests: Sequence[Request], offsets: Sequence[float] | None = None) -> dict[str, Any]:
        """Generate; see measure.py for what it returns. `offsets` None: all requests at once."""
        return self.child.call("run", requests=requests, offsets=offsets, **self.run_arguments)

    def pss_bytes(self) -> int:
        """Memory of its processes, without a server's clients; pages that several processes share count once."""
        root = psutil.Process((self.service or self.child).process.pid)
        return sum(process.memory_full_info().pss for process in (root, *root.children(recursive=True)))


@contextlib.contextmanager
def running_engines(
    names: Sequence[str], settings: dict[str, Any], pythons: dict[str, str | None], folder: Path
) -> Iterator[dict[str, BenchmarkEngine]]:
    """Start the named engines; all their processes end with the block.

    `settings`: fields of EngineConfig, for every engine as far as it has them. `pythons`: the interpreter of each
    environment of PEERS.
    """
    with contextlib.ExitStack() as stack:

        def start(name: str, script: str, child_settings: dict[str, Any], python: str = sys.executable) -> ChildProcess:
            return stack.enter_context(ChildProcess(name, script, child_settings, folder, python))

        started: dict[str, BenchmarkEngine] = {}
        if "offline" in names:
            started["offline"] = BenchmarkEngine("offline", start("offline", "quire_offline.py", settings))
        if set(PROTOCOLS) & set(names):
            service = QuireServeProcess(_document(settings), folder)
            stack.callback(service.stop)
            service.wait_ready()
            child = start("clients", "clients.py", {"model": "bench", **service.ports})
            started |= {
                protocol: BenchmarkEngine(protocol, child, {"via": protocol}, service)
                for protocol in PROTOCOLS
                if protocol in names
            }
        if "transformers" in names:
            child_settings = {"model": settings["model"], "dtype": settings["dtype"], "batch": STATIC_BATCH}
            started["transformers"] = BenchmarkEngine(
                "transformers", start("transformers", "static_batches.py", child_settings)
            )
        # On a CPU it takes no blocks of 16.
        child_settings = {name: value for name, value in settings.items() if name != "block_size"}
        for name, script in (("vllm", "vllm_offline.py"), ("openvino", "openvino_offline.py")):
            if name in names and (python := pythons[name]):
                started[name] = BenchmarkEngine(name, start(name, script, child_settings, python))
        if "vllm-serve" in names and pythons["vllm"]:
            server = start("vllm-serve", "vllm_serve.py", {"python": pythons["vllm"], **child_settings})
            started["vllm-serve"] = BenchmarkEngine("vllm-serve", server)
        yield started


def _document(settings: dict[str, Any]) -> dict[str, Any]:
    """The LLMService with these settings."""
    fields = {re.sub("_(.)", lambda m: m[1].upper(), name): value for name, value in settings.items()}
    source = {"path": fields.pop("model")}
    if fields["dtype"] == "auto":
        del fields["dtype"]
    spec = {"device": "CPU", "model": {"source": source}, "lora": {"maxLoaded": 0}, "engine": fields}
    return {"apiVersion": "quire.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": "bench"}, "spec": spec}


def check_float32(model: str, requests: Sequence[Request], oracle: ChildProcess, folder: Path) -> None:
    """Raise WrongOutput unless this engine in float32 generates what transformers does in float32."""
    with ChildProcess("float32", "quire_offline.py", {"model": model, "dtype": "float32"}, folder) as child:
        outputs = child.call("run", requests=requests, offsets=None)["token_ids"]
    expected = oracle.call("run", requests=requests, offsets=None)["token_ids"]
    for i, (ids, expected_ids) in enumerate(zip(outputs, expected, strict=True)):
        if ids != expected_ids:
            raise WrongOutput(f"in float32, request {i}: this engine generates {ids}, transformers {expected_ids}")


def check_gap(
    name: str,
    requests: Sequence[Request],
    token_ids: Sequence[list[int]],
    oracle: ChildProcess,
    max_gap: float = MAX_GAP,
) -> float:
    """Return the largest gap of the outputs in the measured dtype; raise WrongOutput if it exceeds `max_gap`."""
    pairs = zip(requests, token_ids, strict=True)
    gap = max(oracle.call("worst_gap", prompt=request.prompt_token_ids, output=ids) for request, ids in pairs)
    if gap > max_gap:
        raise WrongOutput(
            f"{name}: a token is {gap:.2f} standard deviations of the logits below the likeliest one in float32; "
            f"rounding accounts for {max_gap} at most"
        )
    return float(gap)
