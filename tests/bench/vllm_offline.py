# SPDX-License-Identifier: Apache-2.0
"""vLLM offline, run by the interpreter of its own environment (--vllm-python); of ours only pace.py and child.py.

All requests at once go through `LLM.generate`, which is its fastest way and tells no times; requests at a rate through
`LLMEngine.add_request` and `step`.
"""

import json
import os
import sys
from typing import Any

import child

answers = child.take_stdout()

# Its "auto" keeps one core free for its scheduler, of two as well.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm  # noqa: E402
from pace import Record, pace  # noqa: E402
from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: E402


class Offline:
    """One loaded model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._llm = vllm.LLM(**settings)

    def about(self) -> dict[str, Any]:
        """Its version, and what decides its speed."""
        return {"version": vllm.__version__} | {k: v for k, v in os.environ.items() if k.startswith(("VLLM", "LD_PRE"))}

    def run(self, requests: list[tuple[list[int], int]], offsets: list[float] | None) -> dict[str, Any]:
        """See measure.py."""
        engine, record = self._llm.llm_engine, Record()
        params = [SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True) for _, num in requests]
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        if offsets is None:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
            token_ids = [list(output.outputs[0].token_ids) for output in outputs]
            return {"seconds": record.now(), "token_ids": token_ids, "events": None}

        def add(i: int) -> None:
            params[i].output_kind = RequestOutputKind.DELTA
            engine.add_request(str(i), prompts[i], params[i])

        def step() -> bool:
            for output in engine.step() if engine.has_unfinished_requests() else ():
                record.take(int(output.request_id), list(output.outputs[0].token_ids), record.now())
            return bool(engine.has_unfinished_requests())

        pace(offsets, record, add, step)
        return record.reply()


if __name__ == "__main__":
    offline = Offline(json.loads(sys.argv[1]))
    child.serve(answers, about=offline.about, run=offline.run)
