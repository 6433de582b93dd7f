# SPDX-License-Identifier: Apache-2.0
"""transformers' continuous batching with random weights made on the device, in a process of its own.

Settings: `shape`, a config.json; dtype; device; `longest`, tokens of the longest prompt and output; `num_requests` of
the largest run; and `batching`, fields of its ContinuousBatchingConfig, whose defaults are its own choice.
"""

import contextlib
import json
import os
import sys
import time
from typing import Any

import child

answers = child.reserve_stdout()

# It asks the hub for faster attention, which would wait for a network.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402
from transformers.generation import ContinuousBatchingConfig, GenerationConfig  # noqa: E402

POLL_S = 1.0


class ContinuousBatches:
    """One model, and a manager of its batches for as long as the process lives."""

    def __init__(self, settings: dict[str, Any], stack: contextlib.ExitStack) -> None:
        shape = {k: v for k, v in settings["shape"].items() if k not in ("architectures", "torch_dtype")}
        # Made in its own type: it plans with the memory that is free, and weights in float32 would have taken of it.
        with torch.device(settings["device"]):
            model = AutoModelForCausalLM.from_config(
                LlamaConfig(**shape), dtype=getattr(torch, settings["dtype"])
            ).eval()
        config = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
        generate_options = {"continuous_batching_config": ContinuousBatchingConfig(**settings["batching"])}
        with contextlib.suppress(ImportError):  # not in every release; by them it sizes its batches
            from transformers.generation.continuous_batching.utils import WorkloadHints

            generate_options["workload_hints"] = WorkloadHints(*settings["longest"], settings["num_requests"])
        self._manager = stack.enter_context(
            model.continuous_batching_context_manager(generation_config=config, timeout=5, **generate_options)
        )

    def run(self, requests: list[tuple[list[int], int]], offsets: None) -> dict[str, Any]:
        """See measure.py; all requests at once, and no times of tokens."""
        start, outputs = time.perf_counter(), {}
        ids = [
            self._manager.add_request(input_ids=prompt, max_new_tokens=num_tokens) for prompt, num_tokens in requests
        ]
        while len(outputs) < len(ids):
            result = self._manager.get_result(timeout=POLL_S)
            if result is None and not self._manager.is_running():
                raise RuntimeError(f"its thread ended with {len(ids) - len(outputs)} requests open")
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(f"request {result.request_id}: {result.error}")
                outputs[result.request_id] = list(result.generated_tokens)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "token_ids": [outputs[request_id] for request_id in ids], "events": None}


if __name__ == "__main__":
    with torch.no_grad(), contextlib.ExitStack() as stack:
        child.serve_commands(answers, run=ContinuousBatches(json.loads(sys.argv[1]), stack).run)
