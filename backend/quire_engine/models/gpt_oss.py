# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: Llama with a mixture of experts, attention sinks, and a sliding window in every second layer."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.moe import MoE
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_engine.weights.param_shard import LoadTarget, ParamShard
from quire_kernels import LinearWeight, SwiGLU
from quire_spec.model.model_config import ModelConfig


class GptOssAttention(RotaryAttention):
    """Attention with a learned sink for each head; `paged_attention` explains `sinks`."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.sinks = factory.empty(shape.num_heads)
        self.communicator = factory.communicator

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Module.tensors."""
        for name, target in super().tensors(prefix):
            if target is self.sinks and self.communicator is not None:
                shard = self.communicator.shard
                heads = range(shard.rank * self.num_heads, (shard.rank + 1) * self.num_heads)
                yield name, ParamShard(target, (shard.model_config.num_heads,), (heads,))
            else:
                yield name, target


class GptOssMoE(MoE):
    """Experts with biases and a clamped activation. The checkpoint has one tensor for all experts, in which gate and up
    features alternate. Matrices are [in_features, out_features]. In mxfp4, the matrices are [out_features,
    in_features]."""

    HAS_ROUTER_BIAS = True

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        super().__init__(shape, factory)
        num_experts, inner = self.config.num_experts, self.config.intermediate_size
        self.experts = replace(
            self.experts,
            gate_up_bias=factory.empty(num_experts, 2 * inner),
            down_bias=factory.empty(num_experts, shape.hidden_size),
            activation=SwiGLU(shape.factors["swiglu_alpha"], shape.factors["swiglu_limit"]),
        )
        self._is_transposed = shape.quantization is None or shape.quantization.method != "mxfp4"

    def bias_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See MoE.bias_tensors."""
        experts, num_experts = self.experts, self.config.num_experts
        assert experts.gate_up_bias is not None and experts.down_bias is not None
        part, inner = self._intermediate_range()
        rows = range(num_experts), range(2 * part.start, 2 * part.stop)
        yield (
            f"{prefix}experts.gate_up_proj_bias",
            ParamShard(experts.gate_up_bias, (num_experts, 2 * inner), rows[:1], rows[1]),
        )
        yield f"{prefix}experts.down_proj_bias", experts.down_bias

    def gate_up_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See MoE.gate_up_tensors."""
        (part, inner), hidden = self._intermediate_range(), self.experts.hidden_size
        rows = range(2 * part.start, 2 * part.stop)
        yield (
            f"{prefix}experts.gate_up_proj",
            self._matrices(self.experts.gate_up, (2 * inner, hidden), rows, range(hidden)),
        )

    def down_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See MoE.down_tensors."""
        (part, inner), hidden = self._intermediate_range(), self.experts.hidden_size
        yield f"{prefix}experts.down_proj", self._matrices(self.experts.down, (hidden, inner), range(hidden), part)

    def _intermediate_range(self) -> tuple[range, int]:
        """Return the range of intermediate features that this rank has, and the number of intermediate features of all
        ranks together."""
        if self.communicator is None:
            return range(self.config.intermediate_size), self.config.intermediate_size
        shard = self.communicator.shard
        return shard.expert_range, shard.size * self.config.intermediate_size

    def _matrices(self, weight: LinearWeight, size: tuple[int, int], rows: range, columns: range) -> ParamShard:
        """Return a shard that fills `weight` [num_experts, len(rows), len(columns)].

        The shard reads these rows and columns from matrices of the size `size`.
        """
        assert isinstance(weight, Tensor)
        if self._is_transposed:
            weight, size, rows, columns = weight.transpose(1, 2), size[::-1], columns, rows
        return ParamShard(weight, (len(weight), *size), (rows,), columns)


class GptOssDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with attention sinks and experts."""

    ATTENTION = GptOssAttention

    @classmethod
    def build_mlp(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> MoE:
        """See LlamaDecoderLayer.build_mlp."""
        return GptOssMoE(shape, factory)


class GptOssForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = GptOssDecoderLayer
