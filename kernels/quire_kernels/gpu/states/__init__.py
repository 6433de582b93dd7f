# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for layers with one state per sequence: prompts, and sequences that decode; see `state_batch`."""
