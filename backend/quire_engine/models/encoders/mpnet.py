# SPDX-License-Identifier: Apache-2.0
"""MPNet: BERT without types of tokens, whose scores of attention depend on the distance between two tokens."""

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_engine.models.encoders.bert import BertLayer, BertModel
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.weights.param_shard import LoadTarget, ParamShard

_NUM_BUCKETS, _MAX_DISTANCE = 32, 128
"""transformers uses these numbers for every checkpoint."""


class MPNetLayer(BertLayer):
    """The layer of BERT with other names."""

    NAMES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"attention_norm": "attention.LayerNorm", "output_norm": "output.LayerNorm"}
    )


class MPNetModel(BertModel):
    """Computes the last hidden states from token ids. All layers add the same bias to the scores of attention."""

    LAYER: ClassVar[type[BertLayer]] = MPNetLayer

    def build_layers(self, factory: ParamFactory) -> None:
        """See CausalLM.build_layers."""
        super().build_layers(factory)
        self.distance_bias = factory.empty(_NUM_BUCKETS, self.shape.num_heads)

    def attention_bias(self, batch: ForwardBatch) -> Tensor:
        """See BertModel.attention_bias."""
        positions = torch.arange(max(batch.attention.lengths), device=self.distance_bias.device)
        buckets = _distance_buckets(positions - positions[:, None])
        return F.embedding(buckets, self.distance_bias).permute(2, 0, 1).contiguous()

    def top_level_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See CausalLM.top_level_tensors."""
        yield from super().top_level_tensors(prefix)
        target: LoadTarget = self.distance_bias
        if self.communicator is not None:
            shard, num_heads = self.communicator.shard, self.shape.num_heads
            heads = range(shard.rank * num_heads, (shard.rank + 1) * num_heads)
            target = ParamShard(
                self.distance_bias, (_NUM_BUCKETS, shard.model_config.num_heads), (range(_NUM_BUCKETS),), heads
            )
        yield f"{prefix}encoder.relative_attention_bias.weight", target


def _distance_buckets(distances: Tensor) -> Tensor:
    """Return the row of the table for each distance from a query to a key, int64. Half of the rows belong to keys after
    the query. Of each half, the first rows belong to one distance each, and further ones to a range."""
    half, exact = _NUM_BUCKETS // 2, _NUM_BUCKETS // 4
    absolute = distances.abs()
    ratios = torch.log(absolute.float() / exact) / math.log(_MAX_DISTANCE / exact)
    ranges = (exact + (ratios.clamp(min=0) * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(absolute < exact, absolute, ranges) + half * (distances > 0)
