# SPDX-License-Identifier: Apache-2.0
"""`transformers.generate` in static batches, in a separate process; in float32 also the oracle of the output check.

A batch is padded on the left to its longest prompt and runs until its longest output is complete, like serving without
continuous batching; only the requested tokens count.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import child

answers = child.reserve_stdout()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from quire_kernels.quantization import GROUP_SIZE, expand_groups, quantize_int4  # noqa: E402


class StaticBatches:
    """One loaded model; `settings`: model, dtype, batch, and folders of adapters for `adapted` and `worst_gap`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=settings["dtype"]).eval()
        self._model.generation_config.eos_token_id = None  # ignore_eos
        self._batch = settings["batch"]
        self._adapters: Sequence[str] = settings.get("adapters", ())
        if self._adapters:
            from peft import PeftModel

            first_folder, *other_folders = self._adapters
            self._model = PeftModel.from_pretrained(
                self._model, first_folder, adapter_name=_adapter_name(first_folder)
            ).eval()
            for folder in other_folders:
                self._model.load_adapter(folder, adapter_name=_adapter_name(folder))

    def about(self) -> dict[str, Any]:
        """What decides its speed."""
        return {"dtype": str(self._model.dtype), "num_threads": torch.get_num_threads(), "batch": self._batch}

    def run(self, requests: list[tuple[list[int], int]], offsets: None) -> dict[str, Any]:
        """See measure.py; all requests at once, in batches in their order."""
        start, token_ids = time.perf_counter(), list[list[int]]()
        for at in range(0, len(requests), self._batch):
            token_ids += self._generate(requests[at : at + self._batch])
        return {"seconds": time.perf_counter() - start, "token_ids": token_ids, "events": None}

    def adapted(self, requests: list[tuple[list[int], int]], adapters: list[str]) -> list[list[int]]:
        """What each request's adapter generates, not merged, one request at a time."""
        outputs = []
        for request, folder in zip(requests, adapters, strict=True):
            self._model.set_adapter(_adapter_name(folder))
            outputs += self._generate([request])
        return outputs

    @torch.inference_mode()
    def round_to_int4(self) -> None:
        """Round the weights of all layers to the 4 bits that Quire gives them. The output projection has 8 bits there,
        and stays as it is here."""
        for linear in self._model.model.layers.modules():
            if isinstance(linear, torch.nn.Linear):
                codes, scales, zeros = quantize_int4(linear.weight)
                scales, zeros = (expand_groups(t.float(), GROUP_SIZE, linear.in_features) for t in (scales, zeros))
                linear.weight.copy_((codes.float() - zeros) * scales)

    @torch.inference_mode()
    def worst_gap(self, prompt: list[int], output: list[int], adapter: str | None = None) -> float:
        """How far the tokens of `output` fall short of the likeliest ones at worst, in standard deviations of the
        logits at their position: 0 for greedy output of this very model, a little more with another rounding, about 4
        for a token at random."""
        if adapter is not None:
            self._model.set_adapter(_adapter_name(adapter))
        logits = self._model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        return float(((logits.amax(-1) - chosen) / logits.std(-1)).max())

    @torch.inference_mode()
    def _generate(self, requests: list[tuple[list[int], int]]) -> list[list[int]]:
        width, max_tokens = (max(sizes) for sizes in zip(*((len(p), num) for p, num in requests), strict=True))
        ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in requests])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in requests])
        out = self._model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        return [row[width : width + num].tolist() for row, (_, num) in zip(out, requests, strict=True)]


def _adapter_name(folder: str) -> str:
    """What peft calls an adapter; it takes no dots or slashes."""
    return Path(folder).name


if __name__ == "__main__":
    static = StaticBatches(json.loads(sys.argv[1]))
    child.serve_commands(
        answers,
        about=static.about,
        run=static.run,
        adapted=static.adapted,
        round_to_int4=static.round_to_int4,
        worst_gap=static.worst_gap,
    )
