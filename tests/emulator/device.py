# SPDX-License-Identifier: Apache-2.0
"""Computation of the emulated device: PyTorch's operations on CUDA tensors, and Triton kernels.

Each operation is queued on the current stream, like a real kernel, and computed when the runtime executes it: by the
CPU, on tensors over the same memory. A queued operation contains only addresses and sizes, so it reads the memory as it
is at that time, even if the memory was reallocated or a graph is replayed.
"""

import atexit
import contextlib
import ctypes
import itertools
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton.runtime.interpreter as interpreter
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

QueuedWork = Callable[[], Any]

DRY = os.environ.get("EMULATOR_DRY", "0") == "1"
"""Nothing is computed: what runs has the shapes, memory and calls of a real device, and every result is 0."""

errors: list[str] = []
"""Tracebacks of work that failed; every wait after it fails as well."""

_runtime = ctypes.CDLL("libcudart.so.13")
_runtime.emulator_enqueue.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
_runtime.emulator_finish.argtypes = [ctypes.c_void_p]
_runtime.emulator_is_capturing.argtypes = [ctypes.c_void_p]
_runtime.emulator_unknown.restype = ctypes.c_char_p
_runtime.emulator_waits.restype = ctypes.c_long
_queued_work: dict[int, QueuedWork] = {}
_captured: set[int] = set()
"""Of `_work`, what stays for the next replay."""
_work_ids = itertools.count(1)
_num_idle = 0
_library: torch.library.Library | None = None
"""Takes back what it has put in place when it is collected."""
_generators: dict[torch.Generator, torch.Generator] = {}
"""The CPU's by CUDA's."""

_REAL_OPERATIONS = (
    *("empty", "empty_strided", "_empty_affine_quantized", "_efficientzerotensor", "resize_", "resize_as_", "set_"),
    *("as_strided", "view", "_reshape_alias", "alias", "unfold", "view_as_real", "view_as_complex", "is_set_to"),
    *("_local_scalar_dense", "_pin_memory", "is_pinned", "record_stream", "_record_function", "copy_", "_copy_from"),
)
"""Operations of PyTorch's that launch no kernel: they are left as they are."""
_DATA_DEPENDENT = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc")


def install() -> None:
    """Emulate in this process from now on."""
    global _library
    if _library is not None:
        return
    torch.cuda.init()
    _runtime.emulator_callback(_run)
    # Python ends threads that come back to it after its end, wherever they are.
    atexit.register(_runtime.emulator_stop)
    _library = torch.library.Library("aten", "IMPL")
    copy = torch.library.get_kernel("aten::copy_", "CUDA")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            if name.startswith("aten::") and base not in _REAL_OPERATIONS:
                operation = getattr(getattr(torch.ops.aten, base), overload or "default")
                _library.impl(name, _EmulatedOperation(operation).__call__, "CUDA", allow_override=True)
        real_copy = _copy_by(lambda to, source, ahead: copy.call_boxed(keys, to, source, ahead))
        _library.impl("aten::copy_", real_copy, "CUDA", allow_override=True)
    # Fused attention has operations of its own for CUDA, which no other device can do in its place.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    interpreter.GridExecutor.__call__ = _launch
    interpreter._patch_lang = _patch_once
    # What it looks for took a quarter of the interpreter's time.
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


@contextlib.contextmanager
def idle() -> Iterator[None]:
    """Skip Triton kernels in this block, except those that a graph records, in its replays. The interpreter is slow,
    and the results of an engine's warm-up are not used."""
    global _num_idle
    _num_idle += 1
    try:
        yield
    finally:
        _num_idle -= 1


def unknown() -> list[str]:
    """Kernels of PyTorch's that were launched past this module, and so computed nothing."""
    return list(filter(None, _runtime.emulator_unknown().decode().split("\n")))


def waits() -> int:
    """How often the host has waited for the device so far."""
    return int(_runtime.emulator_waits())


def enqueue(work: QueuedWork) -> None:
    """Queue work on the current stream.

    Raises:
        RuntimeError: a capture forbids it.
    """
    if DRY:
        work = _do_nothing
    number, stream = next(_work_ids), _stream()
    if _runtime.emulator_is_capturing(stream):
        _captured.add(number)
    elif _num_idle:
        work = _lenient(work)
    _queued_work[number] = work
    if error := _runtime.emulator_enqueue(stream, number):
        raise RuntimeError(f"emulated CUDA: error {error} at a launch")


def _do_nothing() -> None:
    """In place of what is not computed."""


def _lenient(work: QueuedWork) -> QueuedWork:
    def run() -> None:
        # What kernels left out in `idle` may be an index.
        with contextlib.suppress(IndexError, RuntimeError):
            work()

    return run


class _TensorMemory:
    """A CUDA tensor as a kernel knows it."""

    __slots__ = ("address", "dtype", "nbytes", "offset", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()
        self.offset, self.size, self.stride = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.dtype = tensor.dtype

    def open(self) -> Tensor:
        """A CPU tensor over it."""
        empty = torch.empty(0, dtype=self.dtype)
        if not self.nbytes:
            return empty.as_strided(self.size, self.stride)
        memory = (ctypes.c_char * self.nbytes).from_address(self.address)
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return empty.set_(storage, self.offset, self.size, self.stride)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
def _run(number: int) -> int:
    try:
        work = _queued_work[number] if number in _captured else _queued_work.pop(number)
        with torch.inference_mode(), torch._C._DisableTorchDispatch(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
        return 0
    except BaseException:
        errors.append(traceback.format_exc())
        sys.stderr.write(errors[-1])
        return 1


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _finish() -> None:
    if error := _runtime.emulator_finish(_stream()):
        raise RuntimeError(f"emulated CUDA: error {error} at a wait: {errors[-1:]}")


def _is_cuda(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _capture_argument(value: Any) -> Any:
    """An argument as queued work keeps it."""
    if _is_cuda(value):
        return _TensorMemory(value)
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return _generators.setdefault(value, torch.Generator().manual_seed(value.initial_seed()))
    return value


def _resolve(value: Any) -> Any:
    return value.open() if isinstance(value, _TensorMemory) else value


def _to_meta(value: Any) -> Any:
    """An argument without data, to learn the result's size."""
    if _is_cuda(value):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, Tensor):
        return value.to("meta") if value.dim() else value
    if isinstance(value, torch.device):
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


class _EmulatedOperation:
    """What stands in for an operation's CUDA kernel."""

    def __init__(self, operation: Any) -> None:
        self._operation, schema = operation, operation._schema
        self._name = schema.name.removeprefix("aten::")
        self._takes_tensors = [isinstance(argument.type, torch.TensorType) for argument in schema.arguments]
        self._gives_tensors = all(
            isinstance(found.type, (torch.TensorType, torch.ListType)) for found in schema.returns
        )
        written = [
            (place, argument)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._outs = [argument.name for _, argument in written if argument.kwarg_only]
        self._places = {tuple(argument.alias_info.before_set): (place, argument.name) for place, argument in written}
        self._only_writes = bool(written) and all(found.alias_info is not None for found in schema.returns)
        self._returned = [
            tuple(found.alias_info.before_set) for found in schema.returns if found.alias_info is not None
        ]

    def __call__(self, *args: Any, **named: Any) -> Any:
        # A number in a tensor's place comes as one.
        args = tuple(
            torch.tensor(arg) if is_tensor and isinstance(arg, int | float) else arg
            for arg, is_tensor in zip(args, self._takes_tensors, strict=False)
        )
        if self._only_writes:
            return self._write(args, named)
        device = _device_of(tree_flatten((args, named))[0])
        if self._is_sized_by_data(args) or not self._gives_tensors:
            # As the real ones do: they wait.
            _finish()
            found = self._frozen(args, named)()
            return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, found)
        return self._make(device, args, named)

    def _is_sized_by_data(self, args: Any) -> bool:
        masks = (torch.bool, torch.uint8)
        masked = self._name == "index" and any(isinstance(each, Tensor) and each.dtype in masks for each in args[1])
        return masked or self._name in _DATA_DEPENDENT or self._operation.name() == "aten::repeat_interleave.Tensor"

    def _write(self, args: Any, named: Any) -> Any:
        """Into tensors that are given."""
        if any(named[name].numel() == 0 for name in self._outs):
            _give_sizes(self._operation, args, named, self._outs)
        enqueue(self._frozen(args, named))
        targets = {alias: named[name] if name in named else args[at] for alias, (at, name) in self._places.items()}
        found = tuple(targets[alias] for alias in self._returned)
        return found[0] if len(found) == 1 else found or None

    def _make(self, device: torch.device, args: Any, named: Any) -> Any:
        """Tensors that are new."""
        given, by_name = tree_map(_to_meta, (args, named))
        sizes, form = tree_flatten(self._operation(*given, **by_name))
        results = [_empty_like(size, device) if isinstance(size, Tensor) else size for size in sizes]
        memories = [_TensorMemory(value) if isinstance(value, Tensor) else None for value in results]
        compute = self._frozen(args, named)

        def work() -> None:
            for memory, value in zip(memories, tree_flatten(compute())[0], strict=True):
                if memory is not None:
                    memory.open().copy_(value)

        enqueue(work)
        return tree_unflatten(results, form)

    def _frozen(self, args: Any, named: Any) -> QueuedWork:
        flat, form = tree_flatten((args, named))
        kept = [_capture_argument(value) for value in flat]

        def compute() -> Any:
            given, by_name = tree_unflatten([_resolve(value) for value in kept], form)
            return self._operation(*given, **by_name)

        return compute


def _give_sizes(operation: Any, args: Any, named: Any, outs: list[str]) -> None:
    """An operation gives its results their sizes where they are empty."""
    given, by_name = tree_map(_to_meta, (args, named))
    metas = {key: by_name[key] for key in outs}
    operation(*given, **by_name)
    for key, meta in metas.items():
        named[key].resize_(meta.size())


def _device_of(values: list[Any]) -> torch.device:
    found = [value.device for value in values if _is_cuda(value)]
    found += [value for value in values if isinstance(value, torch.device) and value.index is not None]
    return found[0] if found else torch.device("cuda", torch.cuda.current_device())


def _copy_by(real: Callable[[Tensor, Tensor, bool], Tensor]) -> Callable[..., Tensor]:
    """copy_, by the runtime where PyTorch would: between host and device, without a change of type or order."""

    def copy_(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if to.numel() == 0:
            return to
        if _is_cuda(to) and _is_cuda(source):
            target, origin = _TensorMemory(to), _TensorMemory(source)
            enqueue(lambda: target.open().copy_(origin.open()))
            return to
        ordered = to.is_contiguous() and source.is_contiguous() and to.size() == source.size()
        if ordered and to.dtype == source.dtype:
            return real(to, source, non_blocking)
        if _is_cuda(to):
            host = source.to(to.dtype).expand(to.size()).contiguous()
            if source.is_pinned():
                host = host.pin_memory()
            between = to if to.is_contiguous() else torch.empty(to.size(), dtype=to.dtype, device=to.device)
            real(between, host, non_blocking)
            return to if between is to else copy_(to, between)
        between = source.to(to.dtype).expand(to.size()).contiguous()
        if to.is_contiguous():
            return real(to, between, non_blocking)
        return to.copy_(real(torch.empty(to.size(), dtype=to.dtype), between, False))

    return copy_


_launch_on_cpu = interpreter.GridExecutor.__call__
_patch = interpreter._patch_lang
_patched: set[int] = set()


def _launch(self: Any, *args: Any, **named: Any) -> None:
    """A kernel in the Triton language."""
    if not any(_is_cuda(value) for value in (*args, *named.values())):
        _launch_on_cpu(self, *args, **named)
        return
    if _num_idle and not _runtime.emulator_is_capturing(_stream()):
        return
    kept = [_capture_argument(value) for value in args]
    by_name = {key: _capture_argument(value) for key, value in named.items()}
    enqueue(
        lambda: _launch_on_cpu(self, *map(_resolve, kept), **{key: _resolve(value) for key, value in by_name.items()})
    )


class _KeptPatch:
    def restore(self) -> None:
        """What is patched stays so."""


def _patch_once(function: Any) -> _KeptPatch:
    """The interpreter patches the language in each call of each function: a fifth of its time."""
    if id(function.__globals__) not in _patched:
        _patched.add(id(function.__globals__))
        _patch(function)
    return _KeptPatch()
