# SPDX-License-Identifier: Apache-2.0
"""Triton implementations of the operations, for CUDA devices.

dispatch.py imports them when it gets the first CUDA tensor. The modules and functions have the same names as their
references. The functions also take the same arguments. They allocate their results, launch kernels on the current
stream, and never synchronize. Therefore, all of them can be captured in a CUDA graph. With TRITON_INTERPRET=1, Triton's
interpreter runs them on a CPU, in float32 and float16.
"""
