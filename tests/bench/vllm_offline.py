# SPDX-License-Identifier: Apache-2.0
"""vLLM offline, run by the interpreter of its own environment (--vllm-python); of ours only token_arrivals.py and
child.py.

All requests at once go through `LLM.generate`, which is its fastest way and tells no times; requests at a rate through
`LLMEngine.add_request` and `step`.
"""

import json
import os
import sys
import time
from typing import Any

import child

answers = child.reserve_stdout()

# Its "auto" keeps one core free for its scheduler, of two as well.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm  # noqa: E402
from token_arrivals import TokenArrivals  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: E402


class OfflineEngine:
    """One loaded model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._llm = vllm.LLM(**settings)
        self._detokenize = not settings.get("skip_tokenizer_init", False)

    def about(self) -> dict[str, Any]:
        """Its version, and what decides its speed."""
        return {"version": vllm.__version__} | {k: v for k, v in os.environ.items() if k.startswith(("VLLM", "LD_PRE"))}

    def run(
        self,
        requests: list[tuple[list[int], int]],
        offsets: list[float] | None,
        adapters: list[str | None] | None = None,
    ) -> dict[str, Any]:
        """See measure.py. `adapters`: each request's folder, None: the base model; not at a rate."""
        ids = {path: 1 + i for i, path in enumerate(dict.fromkeys(filter(None, adapters or [])))}
        loras = adapters and [path and LoRARequest(path, ids[path], path) for path in adapters]
        fixed_params: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": self._detokenize}
        params = [SamplingParams(max_tokens=num_tokens, **fixed_params) for _, num_tokens in requests]
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        if offsets is not None:
            return self._run_at_rate(prompts, params, offsets)
        record = TokenArrivals()
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return {"seconds": record.now(), "token_ids": token_ids, "events": None}

    def _run_at_rate(self, prompts: list[Any], params: list[SamplingParams], offsets: list[float]) -> dict[str, Any]:
        """Requests come at their time, or after the step that runs then."""
        engine, record, num_added = self._llm.llm_engine, TokenArrivals(), 0
        while num_added < len(offsets) or engine.has_unfinished_requests():
            while num_added < len(offsets) and offsets[num_added] <= record.now():
                params[num_added].output_kind = RequestOutputKind.DELTA
                engine.add_request(str(num_added), prompts[num_added], params[num_added])
                num_added += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, offsets[num_added] - record.now()))
                continue
            for output in engine.step():
                record.add(int(output.request_id), list(output.outputs[0].token_ids))
        return record.to_reply()


if __name__ == "__main__":
    offline = OfflineEngine(json.loads(sys.argv[1]))
    child.serve_commands(answers, about=offline.about, run=offline.run)
