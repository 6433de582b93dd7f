# SPDX-License-Identifier: Apache-2.0
"""The dispatch seam: an operation is its reference, and forms that stand in for it on a type of device.

The reference is plain torch, written to be read, and is the definition of correct: every form is tested against it.
Forms of a device are tried in the order in which they were registered, and the first whose library is there runs. So a
kernel of another library goes behind the same seam: a form more, before or after ours, and no caller changes.

QUIRE_FORMS chooses otherwise, for comparing and for narrowing down a fault: `QUIRE_FORMS=torch` runs that form
wherever an operation has one, `QUIRE_FORMS=paged_attention=torch,rms_norm=reference` only where it says so.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE = "reference"

logger = logging.getLogger(__name__)


class Op(Generic[P, R]):
    """A callable operation; the device of its first argument, a tensor, chooses the form."""

    def __init__(self, reference: Callable[Concatenate[Tensor, P], R], name: str | None = None) -> None:
        """`name`: where the reference's own is not it."""
        self.reference = reference
        self.name = name or reference.__name__
        self.forms: dict[str, Callable[Concatenate[Tensor, P], R]] = {}
        """By type of device: what runs there; filled by the first call, or by a test."""
        self._preferred: dict[str, str] = {}
        """By type of device: the name of what runs there, once it was looked for."""
        self._registered: dict[str, dict[str, Callable[[], Callable[Concatenate[Tensor, P], R]]]] = {}
        """By type of device and name: what gives the form, or raises ImportError where its library is not there."""
        functools.update_wrapper(self, reference)

    def form(
        self, *device_types: str, name: str = "torch"
    ) -> Callable[[Callable[Concatenate[Tensor, P], R]], Callable[Concatenate[Tensor, P], R]]:
        """Register the decorated function for these device types ("cpu", "cuda")."""

        def register(function: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
            for device_type in device_types:
                self._registered.setdefault(device_type, {})[name] = lambda: function
            return function

        return register

    def form_in(self, device_type: str, name: str, module: str) -> None:
        """Register the function `module`.`self.name`, which is imported when it is first needed: the kernel language,
        or another library, need not be there where nobody runs it."""

        def load() -> Callable[Concatenate[Tensor, P], R]:
            found: Callable[Concatenate[Tensor, P], R] = getattr(importlib.import_module(module), self.name)
            return found

        self._registered.setdefault(device_type, {})[name] = load

    def names(self, device_type: str) -> tuple[str, ...]:
        """Of the forms registered for a device, the preferred one first; the reference is always there."""
        return (*self._registered.get(device_type, {}), REFERENCE)

    def named(self, device_type: str, name: str) -> Callable[Concatenate[Tensor, P], R]:
        """One form.

        Raises:
            KeyError: there is none of that name.
            ImportError: its library is not there.
        """
        return self.reference if name == REFERENCE else self._registered[device_type][name]()

    def preferred(self, device_type: str) -> str:
        """The name of the form that runs on such devices."""
        if device_type not in self._preferred:
            self._choose(device_type)
        return self._preferred[device_type]

    def __call__(self, first: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        function = self.forms.get(first.device.type)
        if function is None:
            function = self.forms[first.device.type] = self._choose(first.device.type)
        return function(first, *args, **kwargs)

    def _choose(self, device_type: str) -> Callable[Concatenate[Tensor, P], R]:
        names = self.names(device_type)
        wished = wishes().get(self.name) or wishes().get("")
        if wished in names:
            # Asked for by name: an error is better than another form.
            names = (wished,)
        for name in names:
            try:
                found = self.named(device_type, name)
            except ImportError as error:
                if name == wished:
                    raise
                logger.warning("form left out op=%s form=%s device=%s: %s", self.name, name, device_type, error)
            else:
                self._preferred[device_type] = name
                return found
        raise AssertionError("the reference needs no library")


@functools.cache
def wishes() -> dict[str, str]:
    """What QUIRE_FORMS says: names of forms by operation; "" is for all others."""
    wishes = {}
    for item in filter(None, os.environ.get("QUIRE_FORMS", "").split(",")):
        operation, _, name = item.rpartition("=")
        wishes[operation.strip()] = name.strip()
    return wishes


def refusal(operations: Iterable[Op[Any, Any]], device_type: str) -> str | None:
    """What QUIRE_FORMS asks for that is not there, and what is instead; None where all of it is."""
    names = {operation.name: operation.names(device_type) for operation in operations}
    for operation, form in wishes().items():
        if operation and operation not in names:
            return f"{operation!r} is no operation; use one of {', '.join(sorted(names))}"
        there = names[operation] if operation else tuple(dict.fromkeys(chain.from_iterable(names.values())))
        if form not in there:
            what = operation or "any operation"
            return f"{form!r} is no form of {what} on {device_type}; use one of {', '.join(there)}"
    return None


def operations(names: dict[str, Any]) -> list[Op[Any, Any]]:
    """The operations among a module's names."""
    return [value for value in names.values() if isinstance(value, Op)]
