# SPDX-License-Identifier: Apache-2.0
"""Triton-language forms of the operations, for CUDA devices. dispatch.py imports them when a CUDA tensor comes first.

A module per operation's file, a function per operation, named alike. They take the same arguments as the reference,
allocate what they return, launch on the current stream, and never wait for the device: all of them can be captured in a
CUDA graph. The interpreter of the kernel language (TRITON_INTERPRET=1) runs them on a CPU, in float32 and float16.
"""
