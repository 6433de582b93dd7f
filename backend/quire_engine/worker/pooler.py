# SPDX-License-Identifier: Apache-2.0
"""Pooler: turns the last hidden states of prompts into vectors, as PoolerConfig describes it.

The model runner calls it on tensor-parallel rank 0, where the hidden states are complete. All numbers are float32.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from quire_engine.sequence import Sequence, SlotId
from quire_engine.step.plan import ScheduledSpan
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_engine.weights.loader import CheckpointTensors, read_tensor
from quire_engine.weights.score_head import ACTIVATIONS, ScoreHead
from quire_spec.engine.pooling_params import MAX_POOLED_BYTES, NOT_FINITE, TOO_LARGE, PoolingParams
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.pooler_config import DenseConfig, PoolerConfig


class Pooler:
    """The parts of a checkpoint after the last hidden states. Sequences that are prefilled in chunks have a sum."""

    def __init__(
        self,
        config: PoolerConfig,
        folder: Path,
        shape: ModelConfig,
        find_head: Callable[[SlotId | None], ScoreHead | None],
        device: torch.device,
    ) -> None:
        """Read the weights of the Dense layers and of the head. `find_head` returns the head of the adapter in a slot,
        which replaces that of the checkpoint.

        Raises:
            ConfigError: a tensor is missing or has the wrong shape, or a token of the score does not exist.
        """
        self._config = config
        self._dense = [(*_read_dense(folder, dense, device), dense.activation) for dense in config.dense]
        self._head: ScoreHead | None = None
        if config.tokens:
            self._head = ScoreHead(_token_score(folder, shape, config.tokens, device))
        elif shape.num_labels:
            self._head = ScoreHead.load(folder, shape)
        self._step_token_id = _token_id(folder, config.step_token) if config.step_token else None
        self._find_head = find_head
        self._sums: WeakKeyDictionary[Sequence, Tensor] = WeakKeyDictionary()
        self._parts: WeakKeyDictionary[Sequence, list[bytes]] = WeakKeyDictionary()

    def pool(self, spans: Items[ScheduledSpan], hidden: Tensor) -> list[bytes | None]:
        """Return the numbers of each span that completes a prompt: those of a vector, or of the vectors of all tokens.
        They can be NOT_FINITE or TOO_LARGE instead.

        `hidden` [num_rows, hidden_size] contains the hidden states of the spans' `pooled_positions`.
        """
        pooled: list[Tensor] = []
        start = 0
        for span in spans:
            positions = span.pooled_positions
            rows, start = hidden[start : start + len(positions)], start + len(positions)
            if span.sequence.pooling is not None and not _params(span).is_by_token:
                rows = self._vector(span, rows)
            elif self._step_token_id is not None and positions:
                token_ids = span.sequence.prompt_token_ids
                rows = rows[[i for i, p in enumerate(positions) if token_ids[p] == self._step_token_id]]
            pooled.append(rows)
        counts = [len(rows) for rows in pooled]
        finished = self._finish(torch.cat(pooled).float(), spans, counts) if any(counts) else [None] * len(spans)
        return [self._complete(span, numbers) for span, numbers in zip(spans, finished, strict=True)]

    def _vector(self, span: ScheduledSpan, rows: Tensor) -> Tensor:
        """Return the pooled vector of a span that completes a prompt, [1, hidden_size]; otherwise, no row."""
        if span.sequence.pools_first_token:
            # If the prompt is computed in chunks, the last chunk has a row of its last token, which is not needed.
            if span.start == 0:
                self._sums[span.sequence] = rows
            rows = self._sums[span.sequence]
        elif span.sequence.pools_all_tokens:
            rows = self._add(span.sequence, rows, span.pooled_positions)
        return rows[-1:] if span.completes_pooling else rows[:0]

    def _complete(self, span: ScheduledSpan, numbers: bytes | None) -> bytes | None:
        """Return the numbers of a prompt that is complete, and keep those of the tokens of another one."""
        if span.sequence.pooling is None or not _params(span).is_by_token:
            return numbers
        parts = self._parts.setdefault(span.sequence, [])
        parts += [] if numbers is None else [numbers]
        failure = next((part for part in parts if part in (NOT_FINITE, TOO_LARGE)), None)
        if failure is None and sum(map(len, parts)) > MAX_POOLED_BYTES:
            failure = TOO_LARGE
        if failure is not None:
            parts[:] = [failure]
        if not span.completes_pooling:
            return None
        del self._parts[span.sequence]
        return b"".join(parts)

    def _add(self, sequence: Sequence, rows: Tensor, positions: range) -> Tensor:
        """Add the hidden states at some positions to the sum of a sequence. Return the weighted mean so far,
        [1, hidden_size]."""
        is_weighted = self._config.pooling == "weighted_mean"
        weights = torch.tensor(
            [position + 1 for position in positions] if is_weighted else [1] * len(positions),
            dtype=torch.float32,
            device=rows.device,
        )
        total = weights @ rows.float()
        if (previous := self._sums.get(sequence)) is not None:
            total += previous
        self._sums[sequence] = total
        num_tokens = positions.stop
        return (total / (num_tokens * (num_tokens + 1) / 2 if is_weighted else num_tokens))[None]

    def _finish(self, vectors: Tensor, spans: Items[ScheduledSpan], counts: Items[int]) -> list[bytes | None]:
        """Apply what follows the pooling to vectors [num_vectors, hidden_size]. Return the numbers of each span, which
        has `counts` vectors; None if it has none."""
        for weight, bias, activation in self._dense:
            vectors = ACTIVATIONS[activation](functional.linear(vectors, weight, bias))
        results: list[bytes | None] = [None] * len(spans)
        parts = torch.split(vectors, list(counts))
        kinds = {
            i: (_params(span), None if self._head is None else span.adapter_slot)
            for i, span in enumerate(spans)
            if counts[i]
        }
        for kind, adapter_slot in dict.fromkeys(kinds.values()):
            indices = [i for i, each in kinds.items() if each == (kind, adapter_slot)]
            group = vectors if len(indices) == len(kinds) else torch.cat([parts[i] for i in indices])
            activation = self._config.activation
            if self._head is not None:
                head = self._find_head(adapter_slot) or self._head
                if head.num_labels != self._head.num_labels:
                    activation = "Sigmoid" if head.num_labels == 1 else "Softmax"
                group = head(group)
            if kind.dimensions is not None:
                group = group[:, : kind.dimensions]
            if kind.use_activation:
                is_normalized = self._config.normalize
                group = functional.normalize(group) if is_normalized else ACTIVATIONS[activation](group)
            group = group.cpu().contiguous()
            for i, part in zip(indices, torch.split(group, [counts[i] for i in indices]), strict=True):
                is_finite = bool(torch.isfinite(part).all())
                results[i] = part.numpy().astype("<f4").tobytes() if is_finite else NOT_FINITE
        return results


def _params(span: ScheduledSpan) -> PoolingParams:
    assert span.sequence.pooling is not None
    return span.sequence.pooling


def _read_dense(folder: Path, dense: DenseConfig, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of a Dense layer."""
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (dense.out_features, dense.in_features)}
    if dense.has_bias:
        shapes["linear.bias"] = (dense.out_features,)
    tensors = []
    for name, shape in shapes.items():
        tensor = read_tensor(folder / dense.folder, name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{folder / dense.folder}: {name} has shape {tuple(tensor.shape)}, must be {shape}")
        tensors.append(tensor.float().to(device))
    return tensors[0], tensors[1] if dense.has_bias else None


def _token_score(folder: Path, shape: ModelConfig, tokens: Items[str | int], device: torch.device) -> Tensor:
    """Return the head [1, hidden_size] whose score is the logit of a token, minus that of another one if there is
    one."""
    tensors = CheckpointTensors(folder, shape.quantization)
    head = tensors.find(shape.tied_embedding_name or "lm_head.weight")
    assert head is not None, "the model has loaded it"
    rows = []
    for token in tokens:
        token_id = token if isinstance(token, int) else _token_id(folder, token)
        rows.append(head.read(0, range(token_id, token_id + 1), range(shape.embedding_size), torch.float32).float())
    return (rows[0] - rows[1] if len(rows) > 1 else rows[0]).to(device)


def _token_id(folder: Path, text: str) -> int:
    if (tokenizer := Tokenizer.from_folder(folder)) is None:
        raise ConfigError("the model needs a tokenizer, to find the tokens of its scores; add its files")
    ids = tokenizer.encode(text, None, False)
    if len(ids) != 1:
        raise ConfigError(f"the token of a score: {text!r} is {len(ids)} tokens, must be one")
    return ids[0]
