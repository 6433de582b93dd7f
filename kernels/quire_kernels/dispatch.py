# SPDX-License-Identifier: Apache-2.0
"""The dispatch seam: an operation is its reference, and at most one faster form per device type.

The reference is plain torch, written to be read, and is the definition of correct: every form is tested against it.
A Triton-language kernel becomes `@op.form("cuda")` in its operation's file, and no caller changes.
"""

import functools
from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """A callable operation; the device of its first argument, a tensor, chooses the form."""

    def __init__(self, reference: Callable[Concatenate[Tensor, P], R]) -> None:
        self.reference = reference
        self.forms: dict[str, Callable[Concatenate[Tensor, P], R]] = {}
        functools.update_wrapper(self, reference)

    def form(
        self, *device_types: str
    ) -> Callable[[Callable[Concatenate[Tensor, P], R]], Callable[Concatenate[Tensor, P], R]]:
        """Register the decorated function as what runs on these device types ("cpu", "cuda")."""

        def register(function: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
            for device_type in device_types:
                self.forms[device_type] = function
            return function

        return register

    def __call__(self, first: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.forms.get(first.device.type, self.reference)(first, *args, **kwargs)
