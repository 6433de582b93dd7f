# SPDX-License-Identifier: Apache-2.0
"""Settings of Mamba-2 layers."""

from dataclasses import dataclass, replace
from typing import Any, Self

from quire_spec.model.attention.state_config import MAX_HEAD_DIM, MAX_KERNEL_SIZE, StateConfig, shard_range
from quire_spec.model.hf_config import HFConfigReader

_INFINITY = {"__float__": "Infinity"}


@dataclass(frozen=True, slots=True)
class Mamba2Config(StateConfig):
    """A short convolution over x, B and C, followed by a recurrence with a matrix [state_dim, head_dim] for each
    head."""

    num_heads: int
    head_dim: int
    num_groups: int
    """A divisor of num_heads. Adjacent heads form groups, which have the same B and C."""
    state_dim: int
    """Number of features of B and of C in a group."""
    has_bias: bool
    """Whether the input projection has a bias."""
    has_output_bias: bool
    has_conv_bias: bool
    dt_limits: tuple[float, float]
    """Smallest and largest step size. As in a forward pass of transformers without a cache, they apply to all tokens,
    also to those that are computed one by one."""
    has_norm: bool
    """Whether the gated output is normalized in groups."""
    gates_first: bool
    """Whether the gate is applied before the norm."""

    @property
    def inner_size(self) -> int:
        """Number of features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Number of features of B, and of C, in all groups."""
        return self.num_groups * self.state_dim

    @property
    def conv_size(self) -> int:
        """x, B and C; see StateConfig.conv_size."""
        return self.inner_size + 2 * self.group_size

    @property
    def projection_sizes(self) -> tuple[int, int, int, int, int]:
        """Sizes of the parts of the input projection: gate, x, B, C and dt."""
        return self.inner_size, self.inner_size, self.group_size, self.group_size, self.num_heads

    @property
    def recurrence_shape(self) -> tuple[int, ...]:
        """See StateConfig.recurrence_shape."""
        return self.num_heads, self.state_dim, self.head_dim

    @property
    def input_size(self) -> int:
        """The input of the convolution, and dt; see StateConfig.input_size."""
        return self.conv_size + self.num_heads

    @property
    def feature_sizes(self) -> dict[str, int]:
        """See StateConfig.feature_sizes."""
        return {
            "state_gate_xbc_dt": sum(self.projection_sizes),
            "state_xbc": self.conv_size,
            "state_values": self.inner_size,
            "state_heads": self.num_heads,
        }

    def feature_ranges(self, kind: str, rank: int, size: int) -> tuple[range, ...]:
        """See StateConfig.feature_ranges. A group whose heads are divided among ranks is on all of these ranks."""
        if kind in ("state_values", "state_heads"):
            return (shard_range(self.feature_sizes[kind], rank, size),)
        parts = tuple(zip(("gate", "x", "b", "c", "dt"), self.projection_sizes, strict=True))
        ranges, offset = [], 0
        for name, part in parts[1:4] if kind == "state_xbc" else parts:
            is_replicated = name in ("b", "c") and self.num_groups % size != 0
            ranges.append(range(offset, offset + part) if is_replicated else shard_range(part, rank, size, offset))
            offset += part
        return tuple(ranges)

    def shard(self, size: int) -> Self:
        """See StateConfig.shard."""
        num_groups = 1 if self.num_groups % size else self.num_groups // size
        return replace(self, num_heads=self.num_heads // size, num_groups=num_groups)

    def unsupported_reason(self, size: int) -> str:
        """See StateConfig.unsupported_reason."""
        if self.num_heads % size:
            return f"the number of Mamba-2 heads, {self.num_heads}, is not a multiple of {size}"
        if self.num_groups != 1 and self.num_groups % size:
            return f"the number of groups of Mamba-2 heads, {self.num_groups}, is neither 1 nor a multiple of {size}"
        return ""

    @classmethod
    def from_hf_config(cls, config: HFConfigReader, layers: tuple[bool, ...], attention: tuple[bool, ...]) -> Self:
        """See StateConfig.from_hf_config."""
        key = "mamba_hidden_act" if "mamba_hidden_act" in config else "hidden_act"
        if (activation := config.get_str(key, "silu")) not in ("silu", "swish"):
            raise config.error(key, activation, "silu in a model with Mamba-2 layers")
        num_heads, num_groups = config.get_int("mamba_n_heads"), config.get_int("mamba_n_groups")
        if num_heads % num_groups:
            raise config.error("mamba_n_groups", num_groups, f"a divisor of mamba_n_heads, which is {num_heads}")
        if "mamba_d_ssm" in config:
            inner = config.get_int("mamba_d_ssm")
        else:
            inner = config.get_int("mamba_expand") * config.get_int("hidden_size")
        head_dim = inner // num_heads
        if config.get_raw("mamba_d_head") not in (None, "auto"):
            head_dim = config.get_int("mamba_d_head")
        if num_heads * head_dim != inner or head_dim > MAX_HEAD_DIM:
            expected = f"a number that divides the inner size {inner} into heads of at most {MAX_HEAD_DIM} features"
            raise config.error("mamba_n_heads", num_heads, f"{expected}, or of mamba_d_head features")
        return cls(
            layers=layers,
            attention_layers=attention,
            kernel_size=config.get_int("mamba_d_conv", maximum=MAX_KERNEL_SIZE, minimum=2),
            num_heads=num_heads,
            head_dim=head_dim,
            num_groups=num_groups,
            state_dim=config.get_int("mamba_d_state", maximum=MAX_HEAD_DIM),
            has_bias=config.get_bool("mamba_proj_bias", False),
            has_output_bias=config.get_bool("projectors_bias", config.get_bool("mamba_proj_bias", False)),
            has_conv_bias=config.get_bool("mamba_conv_bias", True),
            dt_limits=_limits(config, config.get_raw("time_step_limit")),
            has_norm=config.get_bool("mamba_rms_norm", True),
            gates_first=not config.get_bool("mamba_norm_before_gate", False),
        )


def _limits(config: HFConfigReader, value: Any) -> tuple[float, float]:
    if value is None:
        return 0.0, float("inf")
    # transformers 5 writes {"__float__": "Infinity"}, because JSON has no infinite numbers.
    limits = [float("inf") if limit == _INFINITY else limit for limit in value] if isinstance(value, list) else []
    if len(limits) != 2 or not all(type(limit) in (int, float) for limit in limits) or not 0 <= limits[0] < limits[1]:
        raise config.error("time_step_limit", value, "two numbers, of which the second is larger, or null")
    return float(limits[0]), float(limits[1])
