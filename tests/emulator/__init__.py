# SPDX-License-Identifier: Apache-2.0
"""Development aid: an emulated NVIDIA GPU that runs PyTorch's CUDA build, Quire's GPU path and Triton kernels on a CPU.

It is frozen: it gets only the features that rehearsals of GPU runs need. `make emulated` runs tests/emulated on it;
`python -m emulator ARGUMENTS` starts a Python with it. PyTorch is the real one, with its allocators, streams, events,
graphs and process groups. This folder replaces the driver and NVIDIA's libraries:

- cudart.cpp: the runtime. It executes queued work as late as CUDA allows and in any order that CUDA allows, fills
  memory with garbage, and rejects calls that a graph capture rejects.
- nccl.cpp: collectives between processes.
- cuda.cpp: the driver functions that Triton's launcher calls.
- device.py: computes operations and kernels on the CPU when the runtime executes them.
- libraries.py: builds these libraries, and stubs of the others that PyTorch is linked to.
- start: runs first in every Python on the device; plugin.py: for tests of engines.

It detects wrong addresses, missing synchronization, memory freed too early, calls that a capture forbids, hangs, and
wrong tokens. It does not show speed, effects of a GPU compiler, or races within a kernel.
"""
