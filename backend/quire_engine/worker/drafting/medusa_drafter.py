# SPDX-License-Identifier: Apache-2.0
"""Drafter that uses Medusa heads.

Each head proposes one token of a draft. All heads read the last hidden state of the sequence. The heads do not compute
attention. Therefore, they do not need a KV cache, and a draft takes only one pass.

Source: Cai et al. 2024 (Medusa). The heads have the layout of FasterDecoding/Medusa, and are stored as safetensors with
the same tensor names. A draft consists of the most likely token of each head. The drafter does not build trees of
candidates.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.step.plan import BlockCopy, ScheduledSpan, SpanOutput
from quire_engine.weights.loader import read_tensors
from quire_engine.worker.drafting.drafter import Drafter
from quire_kernels import linear, to_device_async
from quire_spec.dataclass_json import read_json
from quire_spec.errors import ConfigError
from quire_spec.model.medusa_config import MedusaConfig
from quire_spec.model.model_config import ModelConfig


class MedusaDrafter(Drafter):
    """Medusa heads."""

    block_bytes = 0

    def __init__(
        self,
        folder: Path,
        target: ModelConfig,
        num_tokens: int,
        factory: ParamFactory,
        normalize: Callable[[Tensor], Tensor],
    ) -> None:
        """Allocate the heads in `folder`.

        Args:
            folder: folder of the heads.
            target: configuration of the model.
            num_tokens: maximum number of tokens in a draft. Each of them has its own head. If the folder contains more
                heads, they are not loaded.
            factory: allocates parameters like the model's.
            normalize: the last norm of the model.

        Raises:
            ConfigError: config.json is invalid, or there are fewer heads than `num_tokens`.
        """
        self._num_blocks = MedusaConfig.from_config(read_json(folder / "config.json"), num_tokens).num_blocks
        self._folder, self._device, self._normalize = folder, factory.device, normalize
        size = target.hidden_size
        self._blocks = [
            [(factory.empty(size, size), factory.empty(size)) for _ in range(self._num_blocks)]
            for _ in range(num_tokens)
        ]
        """The weight and the bias of each residual block of each head."""
        self._projections = [factory.empty(target.vocab_size, size) for _ in range(num_tokens)]
        self.num_bytes = sum(tensor.nbytes for tensor in self._parameters().values())

    def allocate(self, num_blocks: int) -> None:
        """See Drafter."""

    @torch.inference_mode()
    def load(self) -> None:
        """See Drafter."""
        tensors = {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in read_tensors(self._folder).items()}
        for name, parameter in self._parameters().items():
            if (tensor := tensors.get(name)) is None or tensor.shape != parameter.shape:
                found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
                raise ConfigError(
                    f"speculative_config.model: {name} of the Medusa heads {found}; config.json and the model require "
                    f"the shape {tuple(parameter.shape)}"
                )
            parameter.copy_(tensor)

    @torch.inference_mode()
    def propose(
        self,
        spans: Sequence[ScheduledSpan],
        outputs: list[SpanOutput],
        copies: Sequence[BlockCopy],
        aux_hidden_states: Tensor | None,
    ) -> list[SpanOutput]:
        """See Drafter. `aux_hidden_states` is the output of the last layer, [num_tokens, hidden_size]."""
        assert aux_hidden_states is not None
        ends = accumulate(span.length for span in spans)
        active = [
            # The second item is the row of the last input token that was not rejected. The token that follows it is the
            # last token of the output.
            (i, end - 1 - (span.num_sampled_rows - len(output.token_ids)), span.num_lookahead_tokens)
            for i, (span, end, output) in enumerate(zip(spans, ends, outputs, strict=True))
            if span.num_lookahead_tokens
        ]
        if not active:
            return outputs
        rows = to_device_async([row for _, row, _ in active], self._device)
        hidden = self._normalize(torch.index_select(aux_hidden_states, 0, rows))
        num_tokens = max(length for *_, length in active)
        tokens = torch.stack([self._most_likely(head, hidden) for head in range(num_tokens)], dim=1).tolist()
        outputs = list(outputs)
        for (i, _, length), draft in zip(active, tokens, strict=True):
            outputs[i] = replace(outputs[i], next_draft_token_ids=tuple(draft[:length]))
        return outputs

    def _most_likely(self, head: int, hidden: Tensor) -> Tensor:
        """Return the most likely tokens of one head, as [num_rows] int64.

        `hidden` contains hidden states as [num_rows, hidden_size].
        """
        for weight, bias in self._blocks[head]:
            hidden = hidden + functional.silu(linear(hidden, weight, bias, None))
        return linear(hidden, self._projections[head], None, None).argmax(dim=-1)

    def _parameters(self) -> dict[str, Tensor]:
        """Return all parameters. The keys are their names in the checkpoint."""
        named = {f"{head}.{self._num_blocks}.weight": weight for head, weight in enumerate(self._projections)}
        for head, blocks in enumerate(self._blocks):
            for index, (weight, bias) in enumerate(blocks):
                named |= {f"{head}.{index}.linear.weight": weight, f"{head}.{index}.linear.bias": bias}
        return named
