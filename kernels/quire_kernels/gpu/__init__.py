# SPDX-License-Identifier: Apache-2.0
"""Triton implementations of the operations, for CUDA devices. dispatch.py imports them at the first CUDA tensor.

Modules and functions have the names of their references. The functions take the same arguments, allocate their results,
launch on the current stream and never synchronize. So all of them can be captured in a CUDA graph. Triton's interpreter
(TRITON_INTERPRET=1) runs them on a CPU, in float32 and float16.
"""
