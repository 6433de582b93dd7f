# SPDX-License-Identifier: Apache-2.0
"""Whether an engine is batch-invariant: the tokens and log probabilities of a request have the same bits in any batch.

Pure. The engine logs the result when it starts, and the planner prints it.
"""

from dataclasses import dataclass

from quire_spec.model.memory_sizing import layer_linear_sizes
from quire_spec.model.model_config import ModelConfig

_PANEL_COLUMNS = 32
"""The compiled kernels of linear layers compute this number of output features together."""
_HEAD_DIMS = range(16, 577, 16)
_MAX_HEADS_PER_KV_HEAD = 48


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The kernels that a machine uses for bfloat16 on the CPU."""

    has_compiled: bool = True
    """Whether the compiled kernels are available: an x86 processor with AVX2 or an ARM64 processor,
    and QUIRE_NATIVE is not 0."""
    has_amx: bool = False
    """Whether oneDNN computes the products, because the processor has AMX."""
    override: str = ""
    """Value of QUIRE_KERNELS."""


def variance_reason(
    shape: ModelConfig, device: str, dtype: str, num_ranks: int = 1, kernels: CpuKernels = CpuKernels()
) -> str | None:
    """Return why outputs can depend on what else is served, or None if they do not.

    Args:
        shape: configuration of the whole model.
        device: cpu or cuda.
        dtype: name of the dtype in which the engine computes.
        num_ranks: number of tensor-parallel ranks.
        kernels: kernels of the machine. The default is a machine with the compiled kernels and without AMX.
    """
    if device != "cpu":
        return "GPU kernels divide the work by the number of tokens in a step"
    if dtype != "bfloat16":
        return f"the compiled CPU kernels compute in bfloat16, not in {dtype}"
    if not kernels.has_compiled:
        return "without the compiled CPU kernels, torch computes, whose sums depend on the size of a step"
    if kernels.has_amx:
        return "on a processor with AMX, oneDNN computes, whose sums depend on the size of a step"
    if kernels.override:
        return f"QUIRE_KERNELS is {kernels.override}"
    if not shape.is_native:
        return "with model_impl transformers, torch computes norms and activations"
    if num_ranks > 1:
        return "the sum over tensor-parallel ranks depends on the size of a step"
    return _size_without_kernel(shape)


def describe(reason: str | None) -> str:
    """Return the text for the log and for the report of `quire plan`."""
    return "batch-invariant: yes" if reason is None else f"batch-invariant: no ({reason})"


def _size_without_kernel(shape: ModelConfig) -> str | None:
    """Return the size of the model for which there is no compiled kernel; None if there is none."""
    if shape.mla is not None:
        return "torch computes the projections of latent attention"
    if shape.states is not None and shape.states.has_recurrence:
        return "a recurrence rounds differently if a prompt is divided into other steps"
    for num_kv_heads, head_dim in map(shape.kv_heads, range(shape.num_layers)):
        if head_dim not in _HEAD_DIMS or shape.num_heads > _MAX_HEADS_PER_KV_HEAD * num_kv_heads:
            return (
                f"the compiled attention needs a head_dim that is a multiple of 16 and at most {_HEAD_DIMS[-1]}, and "
                f"at most {_MAX_HEADS_PER_KV_HEAD} heads per KV head; the model has {head_dim} and "
                f"{shape.num_heads} to {num_kv_heads}"
            )
    # torch computes activations without a gate. Those with an exponential can depend on how its threads divide rows.
    linears = shape.architecture_info.linears
    has_gate = not {"mlp.gate_proj", "feed_forward.w3"}.isdisjoint(linears)
    has_gate |= any("gate_up" in kinds for kinds in linears.values())
    if shape.activation == "gelu" or (not has_gate and shape.activation not in ("relu", "relu2")):
        return f"torch computes the activation {shape.activation}"
    sizes: dict[str, int] = {}
    for layer in range(shape.num_layers):
        sizes |= {path: size for path, (_, size) in layer_linear_sizes(shape, layer).items()}
    if shape.moe is not None and any(shape.moe.layers):
        sizes["an expert"] = shape.moe.intermediate_size
        if shape.activation != "silu":
            return f"the compiled experts have the activation silu, not {shape.activation}"
    for name, size in sizes.items():
        if size % _PANEL_COLUMNS:
            return f"{name} has {size} outputs, and the compiled kernels need a multiple of {_PANEL_COLUMNS}"
    return None
