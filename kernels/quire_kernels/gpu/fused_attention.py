# SPDX-License-Identifier: Apache-2.0
"""Attention of a mixed batch, in which PyTorch's fused attention computes long prompts.

gpu/attention.py computes all other spans.

On Hopper, PyTorch selects cuDNN. cuDNN uses the copy engine (TMA) and specialized warps; the Triton kernel does not use
them. `prefill_attention.py` selects this implementation on Hopper. tests/bench/gpu.py measures both implementations.
According to published figures, cuDNN reaches 582 TFLOP/s on an H100 (16 heads, a head size of 128 and 8,192 tokens).
The attention of Triton's tutorial, which resembles ours, reaches 469 TFLOP/s
(https://github.com/meta-pytorch/tritonbench/issues/141).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire_kernels.attention import AttentionMetadata, PrefillSpan
from quire_kernels.gpu.attention import paged_attention as triton_paged_attention
from quire_kernels.kv_cache_write import as_indexable

MIN_TOKENS = 1024
"""Minimum number of tokens in a prompt that PyTorch's attention computes. A shorter prompt does not gain enough to pay
for three more launches and for copying the keys, the values and the output."""
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Backends in order of preference. The first one that supports the dtypes and shapes is used."""


def paged_attention(
    queries: Tensor,
    cache: Tensor,
    batch: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """See attention.paged_attention.

    For a long prompt, the queries, keys, values and output are read and written one more time than necessary. An
    example is a prompt of 8,192 tokens in bfloat16, with 32 query heads, 8 KV heads and a head size of 128. For this
    prompt, the additional reads and writes move 340 MB, which takes 0.08 ms at 4.3 TB/s. The GEMMs of its attention
    take 0.95 ms at 580 TFLOP/s.
    """
    sdpa_spans = [span for span in batch.prefill_spans if span.length >= MIN_TOKENS]
    is_unsupported = any(option is not None for option in (softcap, sinks, value_dim))
    is_unsupported |= window is not None and window < batch.max_query_len
    if not sdpa_spans or is_unsupported:
        return triton_paged_attention(queries, cache, batch, scale, window, softcap, sinks, value_dim)
    if len(sdpa_spans) < len(batch.context_lengths):
        out = triton_paged_attention(
            queries, cache, replace(batch, separate_prefill_min_tokens=MIN_TOKENS), scale, window, softcap
        )
    else:
        out = queries.new_empty(queries.shape)
    for opening in sdpa_spans:
        out[opening.first_row : opening.first_row + opening.length] = _prefill_with_sdpa(
            queries, cache, batch, opening, scale
        )
    return out


def _prefill_with_sdpa(
    queries: Tensor, cache: Tensor, batch: AttentionMetadata, span: PrefillSpan, scale: float
) -> Tensor:
    """Compute the causal attention of a prefill span over its own keys. The result is [length, num_heads, head_dim]."""
    block_size, num_kv_heads, head_dim = cache.shape[2:]
    rows, blocks = as_indexable(cache.flatten(2)), batch.block_tables[span.span_index, : -(-span.length // block_size)]

    def gather_blocks(kv_index: int) -> Tensor:
        flat = rows[kv_index].index_select(0, blocks).view(cache.dtype).to(queries.dtype)
        return flat.view(-1, num_kv_heads, head_dim)[: span.length]

    # The queries are a view of the projection's output. They are copied even if they need no padding, because cuDNN's
    # plans depend on the strides.
    rows_of_queries = queries[span.first_row : span.first_row + span.length].contiguous()
    q, keys, values = (_pad_to_planned_length(x) for x in (rows_of_queries, gather_blocks(0), gather_blocks(1)))
    return _causal_sdpa(q, keys, values, scale, BACKENDS)[: span.length]


def _causal_sdpa(q: Tensor, keys: Tensor, values: Tensor, scale: float, backends: Sequence[SDPBackend]) -> Tensor:
    """Compute attention with the first backend that supports these inputs.

    The inputs and the result have the shape [length, num_heads, head_dim].
    """
    q, keys, values = (x[None].transpose(1, 2) for x in (q, keys, values))
    with sdpa_kernel(list(backends), set_priority=True):
        output = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return output[0].transpose(0, 1)


def rehearse(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, max_tokens: int) -> int:
    """Compute one prompt for each planned length up to `max_tokens`. The preferred backend, cuDNN, computes them.

    Call this function in the thread that runs the steps, because PyTorch keeps separate plans of cuDNN for each thread.

    Args:
        shape: number of query heads, number of KV heads, and head size.

    Returns:
        Number of lengths.

    Raises:
        RuntimeError: the backend does not support these shapes, or there is not enough memory.
    """
    num_heads, num_kv_heads, head_dim = shape
    lengths = sorted({planned_length(length) for length in range(MIN_TOKENS, max_tokens + 1)})
    with torch.inference_mode():
        for length in lengths:
            q = torch.zeros(length, num_heads, head_dim, dtype=dtype, device=device)
            keys = q.new_zeros(length, num_kv_heads, head_dim)
            _causal_sdpa(q, keys, keys.clone(), head_dim**-0.5, BACKENDS[:1])
    if device.type == "cuda":
        # Synchronize, so that an error of a kernel is reported here and not by the next operation.
        torch.cuda.synchronize(device)
    return len(lengths)


def _pad_to_planned_length(x: Tensor) -> Tensor:
    """Pad x [num_tokens, heads, head_dim] with zeros, so that its length is a planned length. No token attends to the
    padding."""
    missing = planned_length(len(x)) - len(x)
    return F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x


def planned_length(length: int) -> int:
    """Round `length` up to a planned length.

    Between two powers of two, there are eight planned lengths. cuDNN takes some tens of milliseconds to plan for a new
    length, so the number of planned lengths should be small.
    """
    step = max(1 << (length - 1).bit_length() - 4, 1)
    return -(-length // step) * step
