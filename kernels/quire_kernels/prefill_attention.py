# SPDX-License-Identifier: Apache-2.0
"""Selection of the attention kernel for long prompts.

On Hopper, cuDNN is selected if a rehearsal with cuDNN succeeds. Otherwise, the Triton kernel is used. If QUIRE_KERNELS
selects paged_attention=cudnn, cuDNN also computes long chunks that do not begin at the start of a context.
"""

import logging
import time

import torch
from torch import Tensor

from quire_kernels.attention import paged_attention

logger = logging.getLogger(__name__)

_CUDNN_CAPABILITY = (9, 0)
"""Compute capability of Hopper. A kernel without TMA and specialized warps loses more speed on Hopper than on other
GPUs. The Triton kernel uses neither of them.
"""


def select_prefill_attention(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, max_tokens: int
) -> None:
    """Select cuDNN for long prompts, if it can compute all planned lengths on a device of compute capability 9.0.

    A rehearsal builds cuDNN's plans in advance, so that no request has to wait for them. Building the plan for one
    length takes tens of milliseconds. Call this function in the thread that runs the steps. The call must come before
    the memory of a step is measured.

    Args:
        shape: number of query heads, number of KV heads, and head size.
        dtype: dtype of the queries.
        device: any device; on a device without compute capability 9.0, the function does nothing.
        max_tokens: maximum number of tokens of a prompt that one step computes.
    """
    if paged_attention.override not in (None, "fused", "cudnn") or not _is_preferred_on(device):
        return
    # This import loads Triton, which must be installed only where the implementation runs.
    from quire_kernels.gpu import fused_attention

    start = time.perf_counter()
    if max_tokens < fused_attention.MIN_TOKENS:
        return
    try:
        num_lengths = fused_attention.rehearse(shape, dtype, device, max_tokens)
    except RuntimeError as error:
        logger.warning("cuDNN cannot compute prompts; using paged_attention=own: %s", str(error)[:200])
        return
    paged_attention.prefer(device.type, "fused")
    logger.info("cuDNN computes long prompts lengths=%d seconds=%.1f", num_lengths, time.perf_counter() - start)


def prepare_chunk_attention(
    cache: Tensor, num_heads: int, scale: float, dtype: torch.dtype, max_tokens: int, max_blocks: int
) -> None:
    """If QUIRE_KERNELS selects paged_attention=cudnn, build the plans with which cuDNN computes long chunks.

    The plans are built for the cache of one layer.

    Other implementations compute the chunks if cuDNN or the package nvidia-cudnn-frontend is missing, or if the compute
    capability is below 9.0. The reason is then logged once. See `gpu/candidates/cudnn_attention.py:rehearse` for the
    arguments. Call this function in the thread that runs the steps.
    """
    if paged_attention.override != "cudnn":
        return
    # This import loads Triton, which must be installed only where the implementation runs.
    from quire_kernels.gpu.candidates import cudnn_attention

    start = time.perf_counter()
    if min(max_tokens, max_blocks * cache.shape[2] - 1) < cudnn_attention.MIN_TOKENS:
        return
    try:
        if not _has_hopper_kernels(cache.device):
            raise RuntimeError(f"{cache.device} is not a CUDA device of compute capability 9.0 or later")
        num_plans = cudnn_attention.rehearse(cache, num_heads, scale, dtype, max_tokens, max_blocks)
    except (ImportError, RuntimeError) as error:
        logger.warning("cuDNN cannot compute chunks; other kernels compute them: %s", str(error)[:200])
        return
    logger.info("cuDNN computes long chunks plans=%d seconds=%.1f", num_plans, time.perf_counter() - start)


def _has_hopper_kernels(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _CUDNN_CAPABILITY


def _is_preferred_on(device: torch.device) -> bool:
    return _has_hopper_kernels(device) and torch.cuda.get_device_capability(device) == _CUDNN_CAPABILITY
