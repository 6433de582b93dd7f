# SPDX-License-Identifier: Apache-2.0
"""The dispatcher of operations.

Each operation has a reference, and can have implementations for each type of device.

The reference is written in plain torch, so that it is easy to read. It defines the result: tests compare every
implementation with it. For a type of device, the dispatcher tries the implementations in the order in which they were
registered. It takes the first one whose library can be imported. To add a kernel of another library, it is enough to
register one more implementation; callers do not change.

QUIRE_KERNELS overrides this choice. It can be used to compare implementations, or to find the one that has a fault.
`QUIRE_KERNELS=torch` selects the torch implementation of every operation that has one.
`QUIRE_KERNELS=paged_attention=torch,rms_norm=reference` selects the implementation of two operations.
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE = "reference"

logger = logging.getLogger(__name__)


class Op(Generic[P, R]):
    """A callable operation. Its first argument is a tensor, and the device of this tensor decides which implementation
    runs."""

    def __init__(self, reference: Callable[Concatenate[Tensor, P], R], name: str | None = None) -> None:
        """`name` is the name of the operation. If it is None, the operation has the name of its reference."""
        self.reference = reference
        self.name = name or reference.__name__
        self.dispatch_table: dict[str, Callable[Concatenate[Tensor, P], R]] = {}
        """Maps a device type to the selected implementation. The first call on a device fills it in; tests can also do
        this."""
        self._preferred: dict[str, str] = {}
        """Maps a device type to the name of the selected implementation."""
        self._registry: dict[str, dict[str, Callable[[], Callable[Concatenate[Tensor, P], R]]]] = {}
        """Maps a device type and a name to a function that loads the implementation. The function raises ImportError if
        the library of the implementation is missing."""
        functools.update_wrapper(self, reference)

    def register(
        self, *device_types: str, name: str = "torch"
    ) -> Callable[[Callable[Concatenate[Tensor, P], R]], Callable[Concatenate[Tensor, P], R]]:
        """Register the decorated function as the implementation for these device types ("cpu", "cuda")."""

        def decorator(function: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
            for device_type in device_types:
                self._registry.setdefault(device_type, {})[name] = lambda: function
            return function

        return decorator

    def register_lazy(self, device_type: str, name: str, module: str) -> None:
        """Register the function `module`.`self.name`. It is imported only when it is used for the first time. For
        example, Triton is then required only on machines that run such an implementation."""

        def load() -> Callable[Concatenate[Tensor, P], R]:
            implementation: Callable[Concatenate[Tensor, P], R] = getattr(importlib.import_module(module), self.name)
            return implementation

        self._registry.setdefault(device_type, {})[name] = load

    def implementations(self, device_type: str) -> tuple[str, ...]:
        """Return the names of the implementations for a device type, in order of preference. The last one is the
        reference."""
        return (*self._registry.get(device_type, {}), REFERENCE)

    def get(self, device_type: str, name: str) -> Callable[Concatenate[Tensor, P], R]:
        """Return one implementation.

        Raises:
            KeyError: no implementation has that name.
            ImportError: its library cannot be imported.
        """
        return self.reference if name == REFERENCE else self._registry[device_type][name]()

    def preferred(self, device_type: str) -> str:
        """Return the name of the implementation that runs on a device type."""
        if device_type not in self._preferred:
            self._select_implementation(device_type)
        return self._preferred[device_type]

    def prefer(self, device_type: str, name: str) -> None:
        """Select an implementation for a device type, unless QUIRE_KERNELS selects one."""
        if self.override is None:
            self.dispatch_table[device_type] = self.get(device_type, name)
            self._preferred[device_type] = name

    @contextmanager
    def run_on(self, device_type: str, source_type: str, name: str) -> Iterator[None]:
        """While the context is active, tensors on `device_type` use an implementation that is registered for
        `source_type`."""
        function, preferred = self.dispatch_table.get(device_type), self._preferred.get(device_type)
        self.dispatch_table[device_type] = self.get(source_type, name)
        self._preferred[device_type] = name
        try:
            yield
        finally:
            del self.dispatch_table[device_type], self._preferred[device_type]
            if function is not None:
                self.dispatch_table[device_type] = function
            if preferred is not None:
                self._preferred[device_type] = preferred

    @property
    def override(self) -> str | None:
        """Name of the implementation that QUIRE_KERNELS selects, for this operation or for all operations.

        None if QUIRE_KERNELS does not select one; the dispatcher then selects the implementation.
        """
        return overrides().get(self.name) or overrides().get("")

    def __call__(self, first_tensor: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        function = self.dispatch_table.get(first_tensor.device.type)
        if function is None:
            function = self.dispatch_table[first_tensor.device.type] = self._select_implementation(
                first_tensor.device.type
            )
        return function(first_tensor, *args, **kwargs)

    def _select_implementation(self, device_type: str) -> Callable[Concatenate[Tensor, P], R]:
        candidates = self.implementations(device_type)
        override = self.override
        if override in candidates:
            # QUIRE_KERNELS selects this implementation explicitly. If it cannot be imported, an error is better than
            # another implementation.
            candidates = (override,)
        for name in candidates:
            try:
                implementation = self.get(device_type, name)
            except ImportError as error:
                if name == override:
                    raise
                logger.warning(
                    "kernel not available op=%s implementation=%s device=%s: %s", self.name, name, device_type, error
                )
            else:
                self._preferred[device_type] = name
                return implementation
        raise AssertionError("the reference can always be imported")


@functools.cache
def overrides() -> dict[str, str]:
    """Return a dict that maps the name of an operation to the implementation that QUIRE_KERNELS selects. The entry with
    the key "" applies to all operations that have no entry."""
    names_by_op = {}
    for item in filter(None, os.environ.get("QUIRE_KERNELS", "").split(",")):
        operation, _, name = item.rpartition("=")
        names_by_op[operation.strip()] = name.strip()
    return names_by_op


def validate_overrides(operations: Iterable[Op[Any, Any]], device_type: str) -> str | None:
    """Check the names in QUIRE_KERNELS. Return an error message that contains the valid names, or None if all names are
    valid."""
    names_by_op = {operation.name: operation.implementations(device_type) for operation in operations}
    for operation, implementation in overrides().items():
        if operation and operation not in names_by_op:
            return f"{operation!r} is not an operation; use one of {', '.join(sorted(names_by_op))}"
        available = (
            names_by_op[operation] if operation else tuple(dict.fromkeys(chain.from_iterable(names_by_op.values())))
        )
        if implementation not in available:
            target = operation or "any operation"
            return (
                f"{implementation!r} is not an implementation of {target} on {device_type}; "
                f"use one of {', '.join(available)}"
            )
    return None


def collect_ops(namespace: dict[str, Any]) -> list[Op[Any, Any]]:
    """Return all operations that a module's namespace contains."""
    return [value for value in namespace.values() if isinstance(value, Op)]
