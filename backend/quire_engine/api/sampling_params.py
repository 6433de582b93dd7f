# SPDX-License-Identifier: Apache-2.0
"""The parameters that a script creates: like those of quire_spec.engine, but checked when they are created and when a
value is assigned to a field. `LLM` freezes them once for each call."""

from copy import deepcopy
from typing import Any, Self

from msgspec import structs

from quire_spec.engine import sampling_params, structured_outputs


class SamplingParams(sampling_params.SamplingParams, frozen=False, kw_only=True):  # type: ignore[misc]  # mypy treats Structs as dataclasses
    """Sampling parameters of one request. All of them are keyword arguments.

    The class is not frozen, because scripts for vLLM assign to fields (`params.max_tokens = 64`). Whenever a value is
    assigned to a field, it is checked. The constructor checks that the values are consistent with each other; this
    check is repeated when the parameters are used.

    Raises:
        InvalidArgument: a value has the wrong type or is out of range; the message names the parameter.
    """

    guided_decoding: structured_outputs.StructuredOutputsParams | None = None
    """Older name that vLLM had for structured_outputs. The value is moved to that field."""

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            if (value := getattr(self, name)) is not default:
                setattr(self, name, value)
        self.check_consistency()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "guided_decoding":
            structs.force_setattr(self, name, None)
            name = "structured_outputs"
        structs.force_setattr(self, name, sampling_params.check_value(name, value))

    def clone(self) -> Self:
        """Return an independent copy."""
        return deepcopy(self)

    def freeze(self) -> sampling_params.SamplingParams:
        """Return the immutable value that the engine uses.

        Raises:
            InvalidArgument: a value was made invalid in place, or the values contradict each other.
        """
        return sampling_params.SamplingParams.checked(
            **{name: getattr(self, name) for name in sampling_params.SamplingParams.__struct_fields__}
        )


_DEFAULTS = {field.name: field.default for field in structs.fields(SamplingParams)}


class StructuredOutputsParams(structured_outputs.StructuredOutputsParams, frozen=True, kw_only=True):
    """Constraint that the output must match. Exactly one of the first six fields is set.

    Raises:
        InvalidArgument: none or several of these six fields are set, or a value has the wrong type or is too large.
    """

    def __post_init__(self) -> None:
        self.check()


def GuidedDecodingParams(
    *, backend: str | None = None, disable_fallback: bool | None = None, **constraint: Any
) -> StructuredOutputsParams:
    """Build a `StructuredOutputsParams`. Older versions of vLLM used the name GuidedDecodingParams for it. `backend`
    and `disable_fallback` are accepted, but have no effect."""
    return StructuredOutputsParams(**constraint)
