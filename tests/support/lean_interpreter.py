# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without work that has no effect, which takes more than half of its time.

Results do not change. Applies to the process that imports the module.
"""

import dataclasses
import functools
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

# The interpreter repeats each 32-bit operation in 64 bits to find overflows, and then drops the result, because the
# assertion of Triton is compiled in debug mode only.
assert not interpreter.interpreter_builder.options.debug
interpreter.interpreter_builder.options = dataclasses.replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)

_find_numpy_dtype = interpreter._get_np_dtype
_find_numpy_dtype_once = functools.cache(_find_numpy_dtype)


def _get_numpy_dtype(dtype: Any) -> Any:
    """Return NumPy's dtype. Triton builds a dictionary of all dtypes for each tensor."""
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    # Pointer types are not hashable, and Triton does not look them up.
    return _find_numpy_dtype_once(scalar) if type(scalar) is tl.dtype else _find_numpy_dtype(dtype)


interpreter._get_np_dtype = _get_numpy_dtype

_patch_modules = interpreter._patch_lang
_patched: set[str] = set()
"""Names of the modules of Triton's language that the running launch has replaced functions of."""


@functools.cache
def _find_modules(function: Any) -> frozenset[str]:
    """Return the names of the modules of Triton's language that a kernel's file has imported."""
    return frozenset(value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core)


def _patch_modules_once(function: Any) -> Any:
    """Replace the functions of Triton's language by interpreted ones for a launch or for a function that it calls.

    Triton does so in each call of a function, also if the launch has done so.
    """
    modules = _find_modules(function)
    if modules <= _patched:
        return interpreter._LangPatchScope()
    is_launch = not _patched
    scope = _patch_modules(function)
    _patched.update(modules)
    if is_launch:  # Triton restores the functions after a launch only.
        restore = scope.restore

        def forget_and_restore() -> None:
            _patched.clear()
            restore()

        scope.restore = forget_and_restore
    return scope


interpreter._patch_lang = _patch_modules_once
