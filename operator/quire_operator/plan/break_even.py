# SPDX-License-Identifier: Apache-2.0
"""The bandwidth between pods above which reading KV blocks takes less time than computing them. Pure.

It is the size of the KV cache of a token, multiplied by the prompt tokens that a pod computes in a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire_operator.plan.plan import Plan
from quire_spec.model.memory_sizing import computed_elements
from quire_spec.model.model_config import ModelConfig

PEAK_TFLOPS: Mapping[str, float] = {
    "Tesla-T4": 65,
    "NVIDIA-A10": 125,
    "NVIDIA-A10G": 70,
    "NVIDIA-L4": 121,
    "NVIDIA-GeForce-RTX-4090": 165,
    "NVIDIA-A30": 165,
    "NVIDIA-GeForce-RTX-3090": 71,
    "NVIDIA-GeForce-RTX-5090": 210,
    "NVIDIA-A100-PCIE-40GB": 312,
    "NVIDIA-A100-SXM4-40GB": 312,
    "NVIDIA-A40": 150,
    "NVIDIA-L40": 181,
    "NVIDIA-L40S": 362,
    "NVIDIA-RTX-6000-Ada-Generation": 364,
    "NVIDIA-RTX-A6000": 155,
    "NVIDIA-H100-80GB-HBM3": 989,
    "NVIDIA-H100-PCIe": 756,
    "NVIDIA-A100-80GB-PCIe": 312,
    "NVIDIA-A100-SXM4-80GB": 312,
    "NVIDIA-H100-NVL": 835,
    "NVIDIA-H200": 989,
    "NVIDIA-B200": 2250,
}
"""Peak of products of 16-bit matrices without sparsity in 10^12 operations a second, by product label: published
values, which were not measured. They are only used for this estimate."""
_EFFICIENCY = 0.5
"""Part of the peak that the computation of long prompts reaches on most GPUs."""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The estimate for one pod."""

    tokens_per_s: float
    """Prompt tokens that the pod computes in a second."""
    bytes_per_token: float
    """Size of the KV cache of a token on all GPUs of the pod."""

    @classmethod
    def estimate(cls, shape: ModelConfig, plan: Plan) -> "BreakEven | None":
        """Return the estimate for a pod of a plan; None if the speed of its GPU or its KV cache is not known."""
        peak = 0.0 if plan.gpu is None else PEAK_TFLOPS.get(plan.gpu.product, 0.0)
        num_devices = plan.tensorParallelSize.value
        if not peak or not plan.kvTokens:
            return None
        rate = _EFFICIENCY * peak * 1e12 * num_devices / (2 * computed_elements(shape))
        return cls(rate, plan.bytes.kv * num_devices / plan.kvTokens)

    @property
    def bits_per_s(self) -> float:
        """The bandwidth at which both take the same time."""
        return 8 * self.bytes_per_token * self.tokens_per_s
