# SPDX-License-Identifier: Apache-2.0
"""Fallbacks of a phase that failed: environments in which less of what may be wrong runs. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence

FUSED_ATTENTION = "paged_attention=fused"
"""The attention of long prompts by cuDNN; the Triton kernel replaces it."""
OPS_BY_FILE: dict[str, tuple[str, ...]] = {
    "attention": ("paged_attention",),
    "fused_attention": (FUSED_ATTENTION,),
    "lora": ("add_lora", "add_lora_embedding", "route_tokens"),
    "lora_routing": ("add_lora", "add_lora_embedding", "route_tokens"),
    "norm": ("rms_norm", "add_rms_norm"),
    "activation": ("silu_mul", "gelu_mul", "gelu_tanh_mul", "relu_mul"),
    "kv_cache_write": ("rope_and_cache", "write_kv"),
    "sampling": ("sample", "argmax_first", "uniform", "apply_penalties"),
    "step_inputs": ("prepare_inputs",),
    "experts": ("fused_experts",),
    "quantized_linear": ("quantized_linear",),
    "histogram_sampling": ("sample", "argmax_first", "uniform", "apply_penalties"),
}
"""Operations by the file of kernels/quire_kernels/gpu that implements them; they are replaced together."""
_HAS_TORCH_FORM = ("paged_attention", "rms_norm", "linear")
_NOT_CAPTURABLE = (
    "paged_attention",
    "add_lora",
    "add_lora_embedding",
    "route_tokens",
    "prepare_inputs",
    "fused_experts",
)
"""Operations of which the fallback cannot be captured in a CUDA graph."""
_FRAME = re.compile(r"quire_kernels/gpu/(\w+)\.py")


Env = dict[str, str]


def name_of(env: Mapping[str, str]) -> str:
    """Return how the table names an environment."""
    return " ".join(f"{name}={value}" for name, value in env.items()) or "as is"


def rungs(base: Env, wrong_ops: Iterable[str]) -> list[Env]:
    """Return the environments to try in order, from `base`; each contains the changes of the one before."""
    wrong = set(wrong_ops)
    ops = sorted({op for together in OPS_BY_FILE.values() if wrong & set(together) for op in together})
    found = [base, base | {"QUIRE_EARLY_LAUNCH": "0"}]
    if ops:
        forms = ",".join(_fallback(op) for op in ops if op != FUSED_ATTENTION or "paged_attention" not in ops)
        selected = f"{base['QUIRE_KERNELS']},{forms}" if "QUIRE_KERNELS" in base else forms
        graphs = {"QUIRE_GRAPHS": "0"} if set(ops) & set(_NOT_CAPTURABLE) else {}
        found.append(found[-1] | {"QUIRE_KERNELS": selected} | graphs)
    return [*found, found[-1] | {"QUIRE_GRAPHS": "0"}]


def _fallback(op: str) -> str:
    if op == FUSED_ATTENTION:
        return "paged_attention=own"
    return f"{op}={'torch' if op in _HAS_TORCH_FORM else 'reference'}"


def next_rung(base: Env, tried: Sequence[Env], wrong_ops: Iterable[str]) -> Env | None:
    """Return the first environment that was not tried; None: all were."""
    return next((env for env in rungs(base, wrong_ops) if env not in tried), None)


def ops_in_traceback(text: str) -> set[str]:
    """Return the operations whose files the last lines of a log name."""
    files = _FRAME.findall(text[-6000:])
    return set(OPS_BY_FILE.get(files[-1], ())) if files else set()
