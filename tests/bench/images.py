# SPDX-License-Identifier: Apache-2.0
"""Requests with images against a real `quire serve` on the CPU: the time to their first token, and what they cost a
client that streams text.

    python tests/bench/images.py
    python tests/bench/images.py --quire ../other-checkout/.venv/bin/quire

Random weights in the form of Qwen2.5-VL: bfloat16, 12 layers of size 768, a vision tower of 69 million weights. `idle`:
one request at a time with a new image, and nothing else. `beside`: the same request while another client streams; the
gaps are the times between two tokens of that client, from the request to its first token.
"""

import argparse
import base64
import http.client
import io
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import percentile
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / path) for path in ("tests", "hack")]

import torch  # noqa: E402
from support.image_checkpoints import (  # noqa: E402
    CHAT_TEMPLATE,
    END_TOKEN,
    IMAGE_TOKEN,
    START_TOKEN,
    VIDEO_TOKEN,
    add_image_tokenizer,
)
from support.quire_serve import QuireServeProcess  # noqa: E402
from support.tiny_checkpoints import VOCAB  # noqa: E402
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration  # noqa: E402

_TEXT: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
_TEXT |= {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 8192}
_TEXT |= {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}, "initializer_range": 0.04}
_TEXT |= {"bos_token_id": None, "eos_token_id": None}
_VISION: dict[str, Any] = {"depth": 12, "hidden_size": 640, "intermediate_size": 1728, "num_heads": 10}
_VISION |= {"out_hidden_size": 768, "fullatt_block_indexes": [3, 7, 11], "in_channels": 3}
_PROCESSOR: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 14, "merge_size": 2}
_PROCESSOR |= {"temporal_patch_size": 2, "size": {"longest_edge": 12_845_056, "shortest_edge": 3136}}
_PROCESSOR |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
NUM_NEIGHBOUR_TOKENS = 50
"""The neighbour has this many tokens before a request begins."""
MAX_NEIGHBOUR_TOKENS = 7000
"""More than the neighbour gets during a request. Its connection is closed after the request."""


def write_model(folder: Path) -> None:
    """Write a random checkpoint that reads images."""
    marks = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
    marks |= {"vision_start_token_id": START_TOKEN, "vision_end_token_id": END_TOKEN}
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=_TEXT, vision_config=_VISION, **marks)
    Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    add_image_tokenizer(folder)


class Client:
    """Streams chat completions, each on a connection of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._seed = itertools.count()

    def image_prompt(self, size: int) -> list[dict[str, Any]]:
        """Return the content of a message with a new image of size x size pixels."""
        pixels = np.random.default_rng(next(self._seed)).integers(0, 255, (size // 8, size // 8, 3), np.uint8)
        data = io.BytesIO()
        Image.fromarray(pixels).resize((size, size)).save(data, "JPEG", quality=60)
        url = "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
        return [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]

    def stream(
        self, content: Any, max_tokens: int, ended: threading.Event | None = None, times: list[float] | None = None
    ) -> list[float]:
        """Return when each token arrived (time.perf_counter); `times` gets each time at once. Stop reading when `ended`
        is set."""
        body = {"model": "m", "stream": True, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"messages": [{"role": "user", "content": content}]}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response, times = connection.getresponse(), [] if times is None else times
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {response.read()[:300]!r}")
        for line in response:
            if line.startswith(b"data: {") and _is_token(json.loads(line[6:])):
                times.append(time.perf_counter())
            if ended is not None and ended.is_set():
                break
        connection.close()
        return times

    def first_token_s(self, content: Any) -> float:
        """Return the time to the first token."""
        started = time.perf_counter()
        return self.stream(content, 2)[0] - started


def _is_token(event: dict[str, Any]) -> bool:
    # The first event of a chat contains only the role.
    return any(choice["delta"].get("content") for choice in event["choices"])


def measure_idle(client: Client, size: int, runs: int) -> dict[str, float]:
    """Return milliseconds to the first token."""
    values = [1e3 * client.first_token_s(client.image_prompt(size)) for _ in range(runs)]
    return {"ttft": statistics.median(values), "least": min(values), "most": max(values)}


def measure_beside(client: Client, size: int, runs: int) -> dict[str, float]:
    """Return milliseconds to the first token, and the gaps of the neighbour in all runs."""
    firsts, gaps = [], []
    for _ in range(runs):
        times: list[float] = []
        ended = threading.Event()
        neighbour = threading.Thread(target=client.stream, args=("tell me", MAX_NEIGHBOUR_TOKENS, ended, times))
        content = client.image_prompt(size)
        neighbour.start()
        while len(times) < NUM_NEIGHBOUR_TOKENS and neighbour.is_alive():
            time.sleep(0.01)
        started = time.perf_counter()
        firsts.append(client.first_token_s(content))
        ended.set()
        neighbour.join()
        if not times or times[-1] < started + firsts[-1] - 1:
            raise SystemExit("the neighbour ended before the request's first token")
        gaps += [1e3 * (b - a) for a, b in itertools.pairwise(times) if b > started and a < started + firsts[-1]]
    values = {f"gap p{p}": percentile(gaps, p) for p in (50, 99)} | {"gap max": max(gaps)}
    return {"ttft": 1e3 * statistics.median(firsts), **values}


def main() -> None:
    """Start the server, and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="448,1344", help="pixels of an edge; default: %(default)s")
    parser.add_argument("--runs", type=int, default=9, help="requests for each figure; default: %(default)s")
    parser.add_argument("--quire", type=Path, help="the program of another checkout; default: that of this environment")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model, folder = Path(name) / "model", Path(name) / "pod"
        folder.mkdir()
        write_model(model)
        flags = ("--device=cpu", "--max-model-len=8192", "--served-model-name=m")
        serve = QuireServeProcess(str(model), folder, *flags, program=arguments.quire)
        try:
            serve.wait_ready()
            client = Client(serve.ports["openai"])
            for size in map(int, arguments.sizes.split(",")):
                client.first_token_s(client.image_prompt(size))
                for what, function in (("idle", measure_idle), ("beside", measure_beside)):
                    values = function(client, size, arguments.runs)
                    row = ", ".join(f"{key} {value:.0f}" for key, value in values.items())
                    print(f"{size} x {size} pixels, {what}, ms: {row}", flush=True)
        finally:
            serve.stop()


if __name__ == "__main__":
    main()
