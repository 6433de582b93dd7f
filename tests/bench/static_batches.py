# SPDX-License-Identifier: Apache-2.0
"""`transformers.generate` in static batches, in a process of its own; in float32 also the oracle of the check.

A batch is padded on the left to its longest prompt and goes on until its longest output is done, as serving without
continuous batching does; only the tokens that were asked for count.
"""

import json
import sys
import time
from typing import Any

import child

answers = child.take_stdout()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


class StaticBatches:
    """One loaded model; `settings`: model, dtype, batch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=settings["dtype"]).eval()
        self._model.generation_config.eos_token_id = None  # ignore_eos
        self._batch = settings["batch"]

    def about(self) -> dict[str, Any]:
        """What decides its speed."""
        return {"dtype": str(self._model.dtype), "num_threads": torch.get_num_threads(), "batch": self._batch}

    def run(self, requests: list[tuple[list[int], int]], offsets: None) -> dict[str, Any]:
        """See measure.py; all requests at once, in batches in their order."""
        start, token_ids = time.perf_counter(), list[list[int]]()
        for at in range(0, len(requests), self._batch):
            token_ids += self._generate(requests[at : at + self._batch])
        return {"seconds": time.perf_counter() - start, "token_ids": token_ids, "events": None}

    @torch.inference_mode()
    def worst_gap(self, prompt: list[int], output: list[int]) -> float:
        """How far the tokens of `output` fall short of the likeliest ones at worst, in standard deviations of the
        logits at their position: 0 for greedy output of this very model, a little more with another rounding, about 4
        for a token at random."""
        logits = self._model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        taken = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        return float(((logits.amax(-1) - taken) / logits.std(-1)).max())

    @torch.inference_mode()
    def _generate(self, requests: list[tuple[list[int], int]]) -> list[list[int]]:
        width, longest = (max(sizes) for sizes in zip(*((len(p), num) for p, num in requests), strict=True))
        ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in requests])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in requests])
        out = self._model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=0)
        return [row[width : width + num].tolist() for row, (_, num) in zip(out, requests, strict=True)]


if __name__ == "__main__":
    static = StaticBatches(json.loads(sys.argv[1]))
    child.serve(answers, about=static.about, run=static.run, worst_gap=static.worst_gap)
