# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI's continuous batching, run by the interpreter of its own environment (--openvino-python); of ours only
child.py.

The checkpoint is converted once, with the environment's optimum-intel, into a folder beside the model. Weights are
stored as 16-bit floats, or quantized by nncf; the runtime computes in bfloat16 where the processor can.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import child

answers = child.reserve_stdout()

import numpy as np  # noqa: E402
import openvino  # noqa: E402
import openvino_genai  # noqa: E402

_EXPORT_ARGUMENTS = {
    None: ["--weight-format", "fp16"],
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"],
}
"""By `quantization`. Groups of 32 inputs are those of this engine. Both engines give the output projection 8 bits."""
_CACHE_GB = 2


class OfflineEngine:
    """One loaded model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = settings["max_num_seqs"]
        scheduler.max_num_batched_tokens = settings["max_num_batched_tokens"]
        scheduler.cache_size = _CACHE_GB
        folder = _converted(Path(settings["model"]), settings.get("quantization"))
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU")

    def about(self) -> dict[str, Any]:
        """Versions, and the precision that the runtime selects."""
        precision = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT")
        return {"version": openvino_genai.__version__, "precision": str(precision)}

    def run(self, requests: list[tuple[list[int], int]], offsets: None = None) -> dict[str, Any]:
        """See measure.py; all requests at once."""
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt, _ in requests]
        configs = []
        for _, num_tokens in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = num_tokens, True, False
            configs.append(config)
        start = time.perf_counter()
        results = self._pipeline.generate(prompts, configs)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "token_ids": [list(r.m_generation_ids[0]) for r in results], "events": None}


def _converted(model: Path, quantization: str | None) -> Path:
    """Return the folder of the converted checkpoint; conversion takes a minute, once."""
    folder = model.with_name(f"{model.name}-openvino-{quantization or 'fp16'}")
    if not (folder / "openvino_model.xml").exists():
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
        command += ["--task", "text-generation-with-past", *_EXPORT_ARGUMENTS[quantization], str(folder)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


if __name__ == "__main__":
    offline = OfflineEngine(json.loads(sys.argv[1]))
    child.serve_commands(answers, about=offline.about, run=offline.run)
