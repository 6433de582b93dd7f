# SPDX-License-Identifier: Apache-2.0
"""An NVIDIA GPU that is not there: PyTorch's CUDA build, Quire's GPU path and Triton kernels on a CPU.

    make emulated

runs tests/emulated on it; `python -m emulator ARGUMENTS` is a Python that has it. PyTorch is the real one, with its
allocators, streams, events, graphs and process groups. What stands in for the driver and NVIDIA's libraries is here:

- cudart.cpp: the runtime. It does queued work as late as CUDA allows and in any order that CUDA allows, fills memory
  with garbage, and refuses what a capture refuses.
- nccl.cpp: collectives between processes.
- cuda.cpp: of the driver, what Triton's launcher calls.
- device.py: what operations and kernels compute, on the CPU, when the runtime comes to them.
- libraries.py: builds these, and what else PyTorch's libraries want to be linked to.
- start: what every Python on the device runs first; plugin.py: for tests of engines.

It shows wrong addresses, missing waits, memory given back too early, calls that a capture forbids, hangs, and wrong
tokens. It shows nothing of speed, of what a compiler does to a kernel, or of races within one.
"""
