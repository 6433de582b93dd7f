# SPDX-License-Identifier: Apache-2.0
"""Bars and predictions for an H200 and Llama-3.1-8B in bfloat16; the table puts the outcome beside each. Pure.

Floors follow from two rates that PyTorch measured on such a card: a copy of 4.3 TB/s, reads and writes both counted,
and a bfloat16 product of 8192 x 8192 x 8192 random numbers at 790 TFLOP/s. The model reads 15.0 GB of weights per step
(16.06 GB without the embedding, of which a token reads one row); its KV cache takes 4 KiB per token and layer.

32 adapters of rank 16 on all linears have 2.68 GB: 0.88 ms a step at 70 % of the copy. 261 launches of 2.5 us take
0.65 ms: two for each of 128 linears, five for embedding, output projection and routing. Programmatic dependent launch
saves 0.13 ms of them. Loading an adapter makes about 4,500 calls that hold Python's lock for an assumed 8 us each.

The floor of a ratio to another engine is the quotient of both engines' times on a card that reaches both rates. A step
of this engine takes max(15.0 GB / 4.3 TB/s, 15.0 GFLOP x tokens / 790 TFLOP/s), which is 4.9 ms for 256 sequences, and
128 KiB x tokens of context / 4.3 TB/s. vLLM computes and reads the same. For 1,000 tokens in and 200 out of 256
sequences, 282,000 tokens of context on average: the prompts take 4.9 s and a step 13.5 ms, in total 7.6 s. In a step of
transformers without flash attention, each of 256 queries is multiplied by all 282,000 keys, which takes 38 TFLOP:
48 ms. Before that, keys and values of 37 GB are read from blocks, written, read again, and written for each of four
heads that share them, which takes 7 x 37 GB / 4.3 TB/s: 60 ms. With the products a step takes 113 ms, in total 27.5 s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_phases.store import Row


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a measurement should give, and what it must."""

    what: str
    rows: str
    """The key of its rows; or, with a space, the beginning of their `what`."""
    field: str
    """`value`, `fraction` or `tflops` of the rows."""
    floor: str
    predicted: str
    why: str
    """Why the prediction differs from the floor."""
    bar: float | None = None
    aim: float | None = None
    worst: bool = True
    """Whether the worst row counts, and not the best."""
    is_time: bool = False
    """Whether less is better."""

    def outcome(self, rows: Sequence[Row]) -> float | None:
        """Return the measured number; None: none was measured."""
        has_key = " " not in self.rows
        found = [row for row in rows if (row.get("key") == self.rows if has_key else row["what"].startswith(self.rows))]
        values = [row[self.field] for row in found if isinstance(row.get(self.field), int | float)]
        return (max if self.worst == self.is_time else min)(values) if values else None

    def holds(self, outcome: float) -> bool:
        """Return whether the outcome reaches the bar."""
        assert self.bar is not None
        return outcome <= self.bar if self.is_time else outcome >= self.bar


BARS = (
    Prediction("decode attention, 64 to 256 sequences, ragged, of copy bandwidth", "decode_attention", "fraction",
        "1.1 to 4.6 GB a layer", "0.82 to 0.88", "the last share of each worker, and merging", 0.80, 0.90),
    Prediction("prefill attention, 8,192 tokens, causal, TFLOP/s", "prefill_attention", "tflops",
        "550 GFLOP, 0.70 ms: 790", "own 370, cuDNN 530",
        "own: no TMA, no warp specialization; cuDNN: 340 MB of copies", 500, 600, worst=False),
    Prediction("single stream, weight bytes / copy bandwidth", "single", "fraction",
        "15.0 GB, 3.5 ms", "0.71", "10 kernels a layer; the small ones and gaps take 27 of 150 us", 0.75, 0.88),
    Prediction("output tokens/s, 256 sequences at about 1,000", "decode", "value",
        "12.8 ms: 20,000", "14,300", "products of 256 rows run at 500 to 620 TFLOP/s", 14000, 16000),
    Prediction("1000 in / 1000 out, saturated, tokens/s", "saturated", "value",
        "11,900", "9,100", "prefill 6.4 s and 1,000 steps of 21.8 ms for 256 sequences", 9000, 10500),
    Prediction("against transformers' continuous batching", "transformers", "value",
        "27.5 / 7.6 s: 3.6", "4 to 8",
        "each of transformers' operations is a launch from Python, and prompts are masked as well", 3, 6),
    Prediction("against vLLM, same loads", "vllm", "value",
        "the same bytes and operations: 1.0", "0.95 to 1.05",
        "the same products; both replay mixed steps of up to 512 tokens", 1.0, 1.1),
    Prediction("GPU idle per decoding step, 256 sequences, ms", "gaps_256", "value",
        "0", "0.05 to 0.15", "ten small launches and two copies between two graphs", 0.5, 0.1, is_time=True),
    Prediction("32 adapters of rank 16 / own base", "adapters", "value",
        "+ 0.62 ms a step: 0.96", "0.89 to 0.92", "261 launches of 2.5 us, and 70 % of the bandwidth", 0.88, 0.95),
    Prediction("32 adapters of rank 16, against vLLM", "vllm_adapters", "value",
        "the same bytes and operations: 1.0", "1.2",
        "vLLM fills with zeros before each shrink, has no early launch, and starts programs for all rows per adapter",
        1.2, 1.5),
    Prediction("ITL p99 with 100 cold adapters loading / without", "itl", "value",
        "1.0", "1.04", "the loading thread holds Python's lock for 35 ms a load, in pieces", 1.10, 1.03, is_time=True),
    Prediction("weights in the page cache to ready, second start, s", "start", "value",
        "4", "11 to 18", "imports 5, copies by four threads 2, 39 captures 2, rehearsal 3", 20, 10, is_time=True),
)  # fmt: skip
COPY_RATE, MATRIX_RATE = 4.3e12, 790e12
"""Bytes and operations per second, as above."""
EXPERT_BYTES = {"mxfp4": 13.2e6, "int4": 16.3e6, "int8": 24.9e6, "fp8": 24.9e6}
"""Codes, scales and zero points of an expert of gpt-oss-20b, 3 x 2,880 x 2,880 weights, by scheme."""


def _of_quantized_experts(scheme: str, num_tokens: int, field: str, predicted: str, why: str) -> Prediction:
    """Return the prediction of 32 experts, 4 for each token. The floor is the time in which the experts that the tokens
    select are read; or, if it is longer, the time of the products."""
    num_read = 32 * (1 - (1 - 4 / 32) ** num_tokens)
    bytes_us = num_read * EXPERT_BYTES[scheme] / COPY_RATE * 1e6
    products_us = 6.0 * num_tokens * 4 * 2880**2 / MATRIX_RATE * 1e6
    floor = f"{num_read:.1f} x {EXPERT_BYTES[scheme] / 1e6:.1f} MB / 4.3 TB/s: {bytes_us:.0f} us"
    if products_us > bytes_us:
        floor = f"6 x {num_tokens:,} x 4 x 2,880 x 2,880 / 790 TFLOP/s: {products_us:.0f} us"
    unit = {"value": ", us", "tflops": ", TFLOP/s"}.get(field, "")
    rows = f"{scheme}: 32 experts, 4 for each of {num_tokens} tokens"
    what = f"{scheme}: 32 experts, 4 for each of {num_tokens:,} tokens{unit}"
    return Prediction(what, rows, field, floor, predicted, why, worst=field == "value", is_time=field == "value")


_ONE_TOKEN = "five launches that depend on each other take 20 us, and unpacking reads at 45 to 75 % of a copy"
_SIXTEEN_TOKENS = "programs unpack codes in registers, 64 inputs at a time, and the launches take 20 us"
_MANY_TOKENS = "each tile of 64 rows dequantizes its weights again, four times for 256 rows of an expert"
PREDICTIONS = (
    Prediction("base, LoRA enabled / disabled", "lora_enabled", "value", "1.0", "1.0", "graphs without LoRA launches",
        0.98, 1.0),
    Prediction("decode attention, 1 x 32,768", "decode, 1 x 32,768", "fraction", "31 us", "0.60",
        "396 workers with 11 tiles each, then merging"),
    Prediction("decode attention, 1 x 1,024, us", "decode, 1 x 1,024", "value", "1 us", "9 to 12",
        "latency of dependent reads in three launches", is_time=True),
    Prediction("decode attention, 256 x 1,024", "decode, 256 x 1,024", "fraction", "250 us", "0.82 to 0.88",
        "the last share of each worker, and merging"),
    Prediction("chunk of 2,048 tokens behind 30,000, TFLOP/s", "prefill, 2,048 tokens behind 30,000", "tflops",
        "790", "own 380, cuDNN 450", "as for 8,192 tokens, but only a thirtieth of the tiles is on the diagonal; cuDNN "
        "reads blocks of 16 tokens", worst=False),
    Prediction("mixed attention, 1,800 tokens and 248 decodes", "mixed, 1,800", "fraction", "247 us", "0.65",
        "decodes take 280 us, and the prompt's 27 GFLOP 70 us after them"),
    Prediction("mixed step in a graph, 64 sequences at 1,000 and a prompt of 256, ms", "mixed step, 64 sequences at",
        "value", "7.6 ms", "11 to 13", "320 rows: 4.5 TFLOP at 550 TFLOP/s, 8.4 GB of keys and values, no host time",
        is_time=True),
    Prediction("mixed step without a graph, 224 sequences at 1,000 and a prompt of 512, ms",
        "mixed step, 224 sequences at", "value", "20 ms", "26 to 29",
        "736 rows: 10.3 TFLOP at 600 TFLOP/s, 29 GB of keys and values; launches take 6 ms beside it", is_time=True),
    Prediction("product gate_up, 256 rows", "gate_up 4096 x 28672, 256 rows", "tflops", "790", "610",
        "tiles of 128 x 128 fill the card 1.7 times", worst=False),
    Prediction("product o, 256 rows", "o 4096 x 4096, 256 rows", "tflops", "790", "450",
        "64 tiles for 132 multiprocessors", worst=False),
    Prediction("product gate_up, 1 row", "gate_up 4096 x 28672, 1 rows", "fraction", "55 us", "0.85 to 0.92",
        "cuBLAS reads weights at 75 to 92 % of a copy", worst=False),
    Prediction("RMSNorm, 8,192 tokens", "rms_norm (own), 8192", "fraction", "31 us", "0.90", "one pass"),
    Prediction("SiLU and product, 8,192 tokens", "silu_mul (own), 8192", "fraction", "164 us", "0.92", "one pass"),
    Prediction("RoPE and KV write, 8,192 tokens", "rope_and_cache (own), 8192", "fraction", "47 us", "0.85",
        "scattered rows of 256 bytes"),
    Prediction("greedy sampling, 256 rows", "sample greedy (bisection), 256", "fraction", "15 us", "0.45",
        "one program per row, two waves"),
    Prediction("top-p sampling, 256 rows, us", "sample top_p 0.9 (bisection), 256", "value", "15 us once", "500",
        "17 passes, most from the L2 cache", is_time=True),
    Prediction("top-p sampling by histograms, 256 rows, us", "sample top_p 0.9 (histogram), 256", "value",
        "15 us once", "150 to 300", "9 launches; passes from the L2 cache, the first with 66 million atomic additions",
        is_time=True),
    Prediction("top-p sampling, 1 row, us", "sample top_p 0.9 (bisection), 1", "value", "0.1 us", "350",
        "one program for 17 passes of 256 KB, 20 us each", is_time=True),
    Prediction("top-p sampling by histograms, 1 row, us", "sample top_p 0.9 (histogram), 1", "value", "0.1 us",
        "40 to 60", "9 launches of 3 us, and atomic additions to few bins", is_time=True),
    Prediction("drafts kept with 0.8 / none, 1 sequence", "1 sequences, drafts / none", "value", "2.95", "2.5 to 2.8",
        "2.95 tokens a step, which has 4 rows in a graph of 16 tokens, and one more launch a layer", worst=False),
    Prediction("drafts kept with 0.8 / none, 8 sequences", "8 sequences, drafts / none", "value", "2.95", "2.2 to 2.6",
        "32 rows; the verification samples in rounds, for which the host waits", worst=False),
    Prediction("int4 gate_up, 1 row", "int4 gate_up 4096 x 28672, 1 rows", "fraction", "14 us", "0.45 to 0.60",
        "programs unpack codes in registers, 64 inputs at a time; bf16 takes 61 us", worst=False),
    Prediction("int8 gate_up, 1 row", "int8 gate_up 4096 x 28672, 1 rows", "fraction", "27 us", "0.60 to 0.75",
        "as int4, with twice the bytes", worst=False),
    Prediction("fp8 gate_up, 256 rows, TFLOP/s", "fp8 gate_up 4096 x 28672, 256 rows", "tflops", "1,580", "700 to 900",
        "cuBLASLt in 8 bits, and four launches that quantize the inputs", worst=False),
    Prediction("int4 gate_up, 256 rows, TFLOP/s", "int4 gate_up 4096 x 28672, 256 rows", "tflops", "790",
        "150 to 250", "each tile of 64 x 64 dequantizes its weights again, four times for 256 rows", worst=False),
    Prediction("128 experts, 8 for 1 token, us", "128 experts, 8 for each of 1 tokens", "value", "18 us", "35 to 50",
        "five launches that depend on each other, and 96 programs for 8 experts", is_time=True),
    Prediction("128 experts, 8 for each of 256 tokens", "128 experts, 8 for each of 256", "fraction", "281 us",
        "0.60 to 0.75", "tiles of 16 rows read each expert once or twice; no asynchronous start"),
    Prediction("128 experts, 8 for each of 2,048 tokens, TFLOP/s", "128 experts, 8 for each of 2048", "tflops", "790",
        "250 to 350", "tiles of 64 x 64 read operands from the L2 cache too often", worst=False),
    *(
        prediction
        for scheme, one, sixteen, many in (
            ("mxfp4", "40 to 55", "0.40 to 0.55", "150 to 250"),
            ("int4", "45 to 60", "0.40 to 0.55", "150 to 250"),
            ("int8", "50 to 65", "0.55 to 0.70", "200 to 300"),
            ("fp8", "50 to 65", "0.55 to 0.70", "200 to 300"),
        )
        for prediction in (
            _of_quantized_experts(scheme, 1, "value", one, _ONE_TOKEN),
            _of_quantized_experts(scheme, 16, "fraction", sixteen, _SIXTEEN_TOKENS),
            _of_quantized_experts(scheme, 2048, "tflops", many, _MANY_TOKENS),
        )
    ),
    Prediction("penalties, 256 rows", "penalties, 256 rows", "fraction", "38 us", "0.75",
        "and the logits of tokens that have occurred"),
    Prediction("routing, 256 tokens to 32 slots, us", "route, 256 tokens", "value", "0", "5", "two launches",
        is_time=True),
    Prediction("adapters on q, k, v: 32 of rank 16, 256 tokens", "32 adapters of rank 16 on q, k, v", "fraction",
        "6.3 us", "0.55", "two launches, and loads that depend on the table of tiles"),
    Prediction("adapters on gate, up: 32 of rank 16, 256 tokens", "32 adapters of rank 16 on gate, up", "fraction",
        "16 us", "0.65", "four waves of programs hide more of it"),
)  # fmt: skip
