# SPDX-License-Identifier: Apache-2.0
"""This engine offline, in a process of its own: `quire_engine.LLM.generate` under the benchmark's commands."""

import dataclasses
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import child

answers = child.reserve_stdout()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from token_arrivals import TokenArrivals  # noqa: E402

from quire_engine import LLM, LoRARequest, SamplingParams  # noqa: E402
from quire_spec.protocol.messages import StepResult  # noqa: E402

_PAGE_BYTES = 4096
_TORCH_BASELINE_CODE = """
import numpy, torch
torch.ones(256, 256, dtype=torch.bfloat16) @ torch.ones(256, 256, dtype=torch.bfloat16)
print(open("/proc/self/status").read())
"""


class OfflineEngine:
    """One loaded model, watched from around `Engine.step`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._llm = LLM(**settings)
        self._engine_step = self._llm.engine.step
        self._llm.engine.step = self._timed_step  # type: ignore[method-assign]
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here, without what loading took

    def about(self) -> dict[str, Any]:
        """The engine's measured memory plan, dtype included."""
        return dataclasses.asdict(self._llm.engine.memory)

    def run(
        self, requests: list[tuple[list[int], int]], offsets: None, adapters: list[str | None] | None = None
    ) -> dict[str, Any]:
        """See measure.py; all requests at once. `adapters`: each one's folder, None: the base model."""
        loras = adapters and [path and LoRARequest(path, 1 + i, path) for i, path in enumerate(adapters)]
        params = [SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True) for _, num_tokens in requests]
        self._arrivals, self._kv = TokenArrivals(), list[tuple[float, int, int]]()
        prompts = [prompt for prompt, _ in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
        output_ids = {"seconds": self._arrivals.now(), "token_ids": [output.outputs[0].token_ids for output in outputs]}
        return self._arrivals.to_reply() | output_ids | {"kv": self._kv}

    def memory(self) -> dict[str, int]:
        """Bytes: this process at its peak since loading, the parts that are accounted for, and what is beyond them."""
        plan = self._llm.engine.memory
        torch_baseline = subprocess.run(
            [sys.executable, "-c", _TORCH_BASELINE_CODE], capture_output=True, text=True, check=True
        ).stdout
        peak = _status_kib(Path("/proc/self/status").read_text(), "VmHWM")
        components = {
            "weights": plan.weights_bytes,
            "kv": _resident_kv(plan.kv_bytes),
            "torch": _status_kib(torch_baseline, "VmRSS"),
        }
        return {"peak": peak, **components, "beyond": peak - sum(components.values())}

    def _timed_step(self) -> StepResult:
        result = self._engine_step()
        for sequence_result in result.results:
            self._arrivals.add(sequence_result.id, sequence_result.token_ids)
        self._kv.append((self._arrivals.now(), result.stats.num_running, result.stats.num_used_blocks))
        return result


def _resident_kv(kv_bytes: int) -> int:
    """Bytes of the KV cache that are in memory: pages of it that were never written are not."""
    # LLM freezes the objects of the model, which gc.get_objects() then leaves out.
    gc.unfreeze()
    tensors = (
        tensor_page
        for tensor_page in gc.get_objects()
        if type(tensor_page) is torch.Tensor and tensor_page.layout is torch.strided
    )
    [address] = {tensor.data_ptr() for tensor in tensors if tensor.nbytes == kv_bytes}
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(8 * (address // _PAGE_BYTES))
        entries = np.frombuffer(pages.read(8 * (kv_bytes // _PAGE_BYTES)), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum()) * _PAGE_BYTES


def _status_kib(text: str, name: str) -> int:
    """A size of /proc/PID/status, in bytes."""
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:"))


if __name__ == "__main__":
    offline = OfflineEngine(json.loads(sys.argv[1]))
    child.serve_commands(answers, about=offline.about, run=offline.run, memory=offline.memory)
