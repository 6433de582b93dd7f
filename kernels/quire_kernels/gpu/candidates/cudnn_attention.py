# SPDX-License-Identifier: Apache-2.0
"""Attention of a mixed batch, in which cuDNN computes long chunks.

cuDNN reads the keys and values of a chunk from the KV blocks.

A chunk continues its sequence, so its tokens attend to a context that earlier steps wrote. PyTorch's fused attention
cannot read this context in place. The package nvidia-cudnn-frontend describes this attention as a graph, and cuDNN 9.7
or later compiles a kernel for the graph. gpu/fused_attention.py computes all other spans. This implementation is used
only if `QUIRE_KERNELS=paged_attention=cudnn` selects it. `prefill_attention.py` prepares it at start.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire_kernels.attention import AttentionMetadata, PrefillSpan
from quire_kernels.gpu import fused_attention
from quire_kernels.gpu.launch_math import next_power_of_2
from quire_kernels.host_device_copy import to_device_async

MIN_TOKENS = 1024
"""Minimum number of tokens in a chunk that cuDNN computes. For a shorter chunk, a separate launch does not pay off."""
MIN_CUDNN_VERSION = 90700
"""The oldest version of cuDNN that can be used. Since 9.5, cuDNN can read paged keys and values. Since 9.7, it also
accepts ragged offsets for queries."""
_QUERIES, _KEYS, _VALUES, _OUT, _KEY_PAGES, _VALUE_PAGES, _OFFSETS, _QUERY_LENGTH, _KEY_LENGTH = range(1, 10)
"""Numbers that identify the tensors in a graph."""
_ALIGNMENT = 4
"""All int32 numbers of a chunk are stored in one tensor, which has several parts. Each part begins at a multiple of 16
bytes."""


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """The sizes and dtypes that a plan depends on."""

    max_tokens: int
    """Maximum number of tokens in a chunk. It is a power of two."""
    num_heads: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    table_width: int
    """Number of blocks that the longest context has."""
    scale: float
    dtype: torch.dtype


class ChunkPlans:
    """The plans that cuDNN has made for one device and one KV cache."""

    def __init__(self, cudnn: Any, table_width: int, handle: Any, **graph_options: Any) -> None:
        """`handle` is cuDNN's handle. `graph_options` are passed to every graph."""
        self._cudnn = cudnn
        self._handle = handle
        self._table_width = table_width
        self._graph_options = graph_options
        self._graphs: dict[ChunkShape, Any] = {}

    def attend(
        self, queries: Tensor, cache: Tensor, batch: AttentionMetadata, chunk: PrefillSpan, scale: float, out: Tensor
    ) -> None:
        """Compute the attention of a chunk. Write it to the rows of the chunk in `out`, which has the shape
        [num_tokens, num_heads, head_dim]."""
        shape = ChunkShape(
            max(next_power_of_2(chunk.length), MIN_TOKENS),
            queries.shape[1],
            *cache.shape[1:],
            max(self._table_width, batch.block_tables.shape[1]),
            scale,
            queries.dtype,
        )
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._graphs[shape] = self.build(shape)
        numbers = _get_numbers(batch, chunk, shape)
        lengths, pages = numbers[_ALIGNMENT:], numbers[3 * _ALIGNMENT :]
        rows = slice(chunk.first_row, chunk.first_row + chunk.length)
        self._cudnn.set_stream(handle=self._handle, stream=_current_stream(queries.device))
        graph.execute(
            {
                # A plan depends on the strides of its inputs. The queries are often a view of the projection's output,
                # so they are copied.
                _QUERIES: queries[rows].contiguous(),
                _KEYS: cache[0],
                _VALUES: cache[1],
                _OUT: out[rows],
                _KEY_PAGES: pages,
                _VALUE_PAGES: pages,
                _OFFSETS: numbers,
                _QUERY_LENGTH: lengths,
                _KEY_LENGTH: lengths[_ALIGNMENT:],
            },
            torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=queries.device),
            handle=self._handle,
        )

    def build(self, shape: ChunkShape) -> Any:
        """Return the graph for one chunk, together with its plan. cuDNN takes about a second to make the plan."""
        graph = self.describe(shape)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self._cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        return graph

    def describe(self, shape: ChunkShape) -> Any:
        """Return the graph for one chunk, without a plan.

        The queries and the output are described to cuDNN as ragged tensors. Otherwise, cuDNN would also write the rows
        after the end of the chunk. The mask is causal: the last query attends to all keys, the query before it to all
        keys but the last, and so on.
        """
        cudnn = self._cudnn
        dtype = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[shape.dtype]
        int32, float32 = cudnn.data_type.INT32, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            io_data_type=dtype,
            intermediate_data_type=float32,
            compute_data_type=float32,
            handle=self._handle,
            **self._graph_options,
        )

        def integers(name: str, uid: int, *dims: int) -> Any:
            strides = [dims[1] * dims[2], dims[2], 1, 1]
            return graph.tensor(dim=list(dims), stride=strides, data_type=int32, name=name, uid=uid)

        def container(name: str, uid: int) -> Any:
            heads, size, dim = shape.num_kv_heads, shape.block_size, shape.head_dim
            strides = [size * heads * dim, dim, heads * dim, 1]
            return graph.tensor(dim=[shape.num_blocks, heads, size, dim], stride=strides, name=name, uid=uid)

        row = shape.num_heads * shape.head_dim
        dims = [1, shape.num_heads, shape.max_tokens, shape.head_dim]
        strides = [shape.max_tokens * row, shape.head_dim, row, 1]
        offsets = integers("offsets", _OFFSETS, 2, 1, 1, 1)
        queries = graph.tensor(dim=dims, stride=strides, ragged_offset=offsets, name="queries", uid=_QUERIES)
        out, _ = graph.sdpa(
            q=queries,
            k=container("keys", _KEYS),
            v=container("values", _VALUES),
            attn_scale=shape.scale,
            generate_stats=False,
            use_padding_mask=True,
            seq_len_q=integers("query_length", _QUERY_LENGTH, 1, 1, 1, 1),
            seq_len_kv=integers("key_length", _KEY_LENGTH, 1, 1, 1, 1),
            diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
            diagonal_band_right_bound=0,
            paged_attention_k_table=integers("key_pages", _KEY_PAGES, 1, 1, shape.table_width, 1),
            paged_attention_v_table=integers("value_pages", _VALUE_PAGES, 1, 1, shape.table_width, 1),
            paged_attention_max_seq_len_kv=shape.table_width * shape.block_size,
        )
        out.set_output(True).set_uid(_OUT).set_data_type(dtype)
        out.set_dim(dims).set_stride(strides).set_ragged_offset(offsets)
        return graph


_plans: dict[torch.device, ChunkPlans] = {}
"""Maps a device to its plans. `rehearse` fills it."""


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
    """See attention.paged_attention. It takes 4 * num_heads * head_dim operations for each pair of a token and a key to
    which the token attends. Keys and values are not copied."""
    plans = _plans.get(queries.device)
    chunks = [span for span in batch.chunk_spans if span.length >= MIN_TOKENS]
    has_options = any(option is not None for option in (window, softcap, sinks, value_dim))
    if plans is None or not chunks or has_options or cache.dtype != queries.dtype:
        return fused_attention.paged_attention(queries, cache, batch, scale, window, softcap, sinks, value_dim)
    others = replace(batch, separate_chunk_min_tokens=MIN_TOKENS)
    out = fused_attention.paged_attention(queries, cache, others, scale)
    for chunk in chunks:
        plans.attend(queries, cache, batch, chunk, scale, out)
    return out


def rehearse(cache: Tensor, num_heads: int, scale: float, dtype: torch.dtype, max_tokens: int, max_blocks: int) -> int:
    """For this cache, build and run the plans for chunks of up to `max_tokens` tokens.

    Plans for another cache of the device are dropped.

    Args:
        cache: one layer's cache; see attention.paged_attention. The rehearsal reads block 0.
        num_heads: number of query heads.
        scale: number by which the scores are multiplied.
        dtype: dtype of the queries.
        max_tokens: maximum number of tokens in a chunk.
        max_blocks: number of blocks of the longest context.

    Returns:
        Number of plans.

    Raises:
        ImportError: the package nvidia-cudnn-frontend or cuDNN is not installed, or cuDNN is too old.
        RuntimeError: cuDNN does not support these shapes, or there is not enough memory.
    """
    _plans.pop(cache.device, None)
    if cache.dtype != dtype or dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"the cache has dtype {cache.dtype} and queries have {dtype}; use bfloat16 for both")
    cudnn = _import_cudnn()
    plans = ChunkPlans(cudnn, max_blocks, cudnn.create_handle())
    lengths = [length for length in (MIN_TOKENS << i for i in range(20)) if length < 2 * max_tokens]
    head_dim, block_size = cache.shape[4], cache.shape[2]
    with torch.inference_mode():
        tables = torch.zeros(1, max_blocks, dtype=torch.int64, device=cache.device)
        for length in lengths:
            num_tokens = min(length, max_tokens)
            queries = torch.zeros(num_tokens, num_heads, head_dim, dtype=dtype, device=cache.device)
            ends = torch.tensor([0, num_tokens, max_blocks * block_size], dtype=torch.int32, device=cache.device)
            batch = AttentionMetadata(ends[:2], ends[2:], tables, tuple, [num_tokens])
            out = queries.new_empty(queries.shape)
            plans.attend(queries, cache, batch, PrefillSpan(0, 0, num_tokens), scale, out)
    if cache.device.type == "cuda":
        # Synchronize, so that an error of a kernel is reported here and not by the next operation.
        torch.cuda.synchronize(cache.device)
    _plans[cache.device] = plans
    return len(lengths)


def _import_cudnn() -> Any:
    import cudnn

    try:
        version = cudnn.backend_version()
    except RuntimeError as error:
        raise ImportError(f"libcudnn is not installed: {error}") from error
    if version < MIN_CUDNN_VERSION:
        raise ImportError(f"cuDNN has version {version}; use {MIN_CUDNN_VERSION} or later")
    return cudnn


def _get_numbers(batch: AttentionMetadata, chunk: PrefillSpan, shape: ChunkShape) -> Tensor:
    """Return the row offsets, the lengths of the queries and of the keys, and the pages. All are int32. The first layer
    of a step computes these numbers, and the other layers use them."""
    key = "cudnn", chunk, shape.table_width
    numbers = batch.work_plans.get(key)
    if numbers is None:
        known = torch.zeros(2, _ALIGNMENT, dtype=torch.int32)
        known[0, 1], known[1, 0] = chunk.length * shape.num_heads * shape.head_dim, chunk.length
        numbers = batch.context_lengths.new_empty(3 * _ALIGNMENT + shape.table_width)
        numbers[: known.numel()] = to_device_async(known.flatten(), numbers.device)
        numbers[known.numel()] = batch.context_lengths[chunk.span_index]
        table = batch.block_tables[chunk.span_index]
        pages = numbers[3 * _ALIGNMENT :]
        # The pages after the end of the context repeat blocks of the same sequence.
        pages[:] = table[0]
        pages[: len(table)] = table
        batch.work_plans[key] = numbers
    return numbers


def _current_stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
