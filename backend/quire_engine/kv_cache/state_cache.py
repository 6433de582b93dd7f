# SPDX-License-Identifier: Apache-2.0
"""The state cache: device memory for the states of sequences. Only this module depends on the layout of a state.

The scheduler assigns rows to sequences, and each layer passes its own tensors to the kernels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.kv_cache.row_file import RowPart
from quire_engine.step.plan import SwapCopy
from quire_kernels import StateBatch, pin, pinned_empty, to_device_async
from quire_spec.model.attention.state_config import StateConfig


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer."""

    convolution: Tensor
    """[num_rows, kernel_size - 1, conv_size], dtype of the activations; see `short_convolution`."""
    recurrence: Tensor
    """[num_rows, *matrices]; see `gated_delta_rule`. It has no elements if the layer has no recurrence."""
    drafts: Tensor
    """[num_rows, max_drafts, input_size], dtype of the activations: inputs of the drafts of the last step, which the
    state does not contain."""

    def replay_drafts(self, batch: StateBatch, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of all tokens of the batch, and keep the inputs of the drafts of the step.

        Args:
            batch: the tokens of the batch.
            inputs: inputs of the tokens of the step by which a token changes the state, [num_tokens, size] each.

        Returns:
            The inputs of the tokens of the batch, in the same order.
        """
        if (drafts := batch.drafts) is None:
            return inputs
        joined, kept = torch.cat(inputs, dim=1), self.drafts.flatten(0, 1)
        replayed = torch.cat((kept[drafts.read_rows], joined))[drafts.order]
        kept[drafts.kept_rows] = joined[drafts.kept_tokens]
        return torch.split(replayed, [part.shape[1] for part in inputs], dim=1)


def host_part_bytes(config: StateConfig, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of the convolution and of the recurrence in the part of a rank in a row of a file. `config` is
    that of the rank."""
    convolution = (config.kernel_size - 1) * config.conv_size * dtype.itemsize
    recurrence = math.prod(config.recurrence_shape) * state_dtype.itemsize
    return _padded(config.num_layers * convolution), _padded(config.num_layers * recurrence)


def _padded(num_bytes: int) -> int:
    """Return the bytes after which values of every dtype can begin."""
    return -(-num_bytes // 16) * 16


def drop_replayed(batch: StateBatch, out: Tensor) -> Tensor:
    """Return the rows of `out`, which has one for each token of the batch, that belong to tokens of the step."""
    return out if batch.drafts is None else out[batch.drafts.outputs]


class StateCache:
    """States of `num_rows` sequences. A sequence never reads old values of another one: its row is zeroed before its
    first token, or is a copy of a snapshot."""

    def __init__(
        self,
        config: StateConfig,
        num_rows: int,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
        max_drafts: int = 0,
    ) -> None:
        """Allocate the states, and memory for the inputs of `max_drafts` drafts of each sequence. The memory is not
        zeroed, because a page on a CPU takes memory only after the first write."""
        self.num_rows = num_rows
        self.max_drafts = max_drafts
        self._device = device
        convolution_size = config.num_layers, num_rows, config.kernel_size - 1, config.conv_size
        self._convolution = torch.empty(convolution_size, dtype=dtype, device=device)
        recurrence_size = config.num_layers, num_rows, *config.recurrence_shape
        self._recurrence = torch.empty(recurrence_size, dtype=state_dtype, device=device)
        drafts_size = config.num_layers, num_rows, max_drafts, config.input_size
        self._drafts = torch.empty(drafts_size, dtype=dtype, device=device)
        states = map(LayerStates, self._convolution, self._recurrence, self._drafts)
        self._host: tuple[Tensor, ...] = ()
        self._host_part: RowPart | None = None
        # Whole rows of the file with the parts of all ranks, if there is one, and where they begin in it.
        self._host_file_rows: Tensor | None = None
        self._host_start = 0
        # On a GPU: the end of the latest copies to or from host memory.
        self._copied: torch.cuda.Event | None = None
        self.layers = {layer: next(states) for layer, has_state in enumerate(config.layers) if has_state}
        """The states of each layer that has them, by index of the layer."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all states."""
        return self._convolution.nbytes + self._recurrence.nbytes + self._drafts.nbytes

    def allocate_host(
        self, num_rows: int, part: RowPart | None = None, rows: memoryview | None = None, start: int = 0
    ) -> None:
        """Allocate host memory for `num_rows` snapshots, whose numbers follow those of the rows of the device. It is
        pinned if the states are on a GPU. With `part`, the memory is this part of `rows`, which are in a file that
        other processes can read, and begin at byte `start` of it."""
        is_pinned, kinds = self._device.type == "cuda", (self._convolution, self._recurrence)
        if part is not None and rows:
            memory = torch.frombuffer(rows, dtype=torch.uint8)
            self._host_part, self._host_start = part, start
            self._host_file_rows = (pin(memory) if is_pinned else memory).view(num_rows, -1)
            first = part.rank * part.state_bytes
            for states in kinds:
                size = len(states), *states.shape[2:]
                end = first + math.prod(size) * states.itemsize
                self._host += (self._host_file_rows[:, first:end].view(states.dtype).view(num_rows, *size),)
                first += _padded(end - first)
            return
        for states in kinds:
            size = num_rows, len(states), *states.shape[2:]
            host = pinned_empty(size, states.dtype) if is_pinned else torch.empty(size, dtype=states.dtype)
            self._host += (host,)

    @property
    def host_rows(self) -> "HostStateRows | None":
        """The host memory for snapshots; None if there is none."""
        if not self._host:
            return None
        rows = self._host_part, self._host_file_rows, self._host_start
        return HostStateRows(self, self._host, self._device.type, *rows)

    def synchronize_host(self) -> None:
        """Wait until the copies to and from host memory that were started before are complete. Any thread can call
        this."""
        if self._copied is not None:
            self._copied.synchronize()

    def zero(self, rows: Sequence[int]) -> None:
        """Zero the states of sequences that begin."""
        if rows:
            ids = to_device_async(torch.tensor(rows), self._device)
            for states in (self._convolution, self._recurrence):
                states.index_fill_(1, ids, 0)

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy states, one after the other: a copy can read what an earlier one has written. Rows after those of the
        device are in host memory. On a GPU, copies to and from it are asynchronous."""
        for source, destination in zip(sources, destinations, strict=True):
            for i in range(2):
                self._row(i, destination).copy_(self._row(i, source), non_blocking=True)
        if self._device.type == "cuda" and any(row >= self.num_rows for row in (*sources, *destinations)):
            self._copied = torch.cuda.current_stream().record_event()

    def _row(self, index: int, row: int) -> Tensor:
        """Return a state's convolution (0) or recurrence (1) in all layers, [num_layers, ...]."""
        if row >= self.num_rows:
            return self._host[index][row - self.num_rows]
        return (self._convolution, self._recurrence)[index][:, row]


class HostStateRows:
    """The host memory for snapshots of states, as HostRows of a store. Their numbers begin with 0. A row has the parts
    of all ranks if it is in a file."""

    nodes: None = None

    def __init__(
        self,
        states: StateCache,
        host: Sequence[Tensor],
        device_type: str,
        part: RowPart | None = None,
        file_rows: Tensor | None = None,
        start: int = 0,
    ) -> None:
        """`host`: the rows of each kind of values of a state on this rank, [num_rows, num_layers, ...]. `file_rows`:
        the rows of the file, uint8 [num_rows, bytes], if there is one, which begin at byte `start`. `part` is that of
        this rank."""
        self._states = states
        self._parts = [rows for rows in host if rows.numel()]
        self._device_type = device_type
        self._part, self._file_rows = part, file_rows
        self.start = start

    @property
    def file(self) -> int | None:
        """See HostRows."""
        return None if self._part is None else self._part.file.file

    @property
    def layout(self) -> str:
        """See HostRows."""
        shapes = [f"{rows.dtype} {(*rows.shape[1:],)}" for rows in self._parts]
        num_bytes = sum(rows[0].nbytes for rows in self._parts)
        if (part := self._part) is not None and part.state_row_bytes != num_bytes:
            # There are several ranks, or gaps between the values.
            shapes.append(str([part.state_bytes] * len(part.sizes)))
        return " ".join(("states", self._device_type, *shapes))

    def buffers(self, row: int) -> list[memoryview]:
        """See HostRows."""
        if self._file_rows is not None:
            return [self._file_rows[row].numpy().data]
        return [rows[row].flatten().view(torch.uint8).numpy().data for rows in self._parts]

    def copy(self, swap_outs: Sequence[SwapCopy], swap_ins: Sequence[SwapCopy]) -> None:
        """See HostRows. Most copies of states are part of a step; see `StateCache.copy`."""
        first = self._states.num_rows
        for copies in (
            [(copy.block, first + copy.host_block) for copy in swap_outs],
            [(first + copy.host_block, copy.block) for copy in swap_ins],
        ):
            self._states.copy([source for source, _ in copies], [destination for _, destination in copies])

    def synchronize(self) -> None:
        """See HostRows."""
        self._states.synchronize_host()
