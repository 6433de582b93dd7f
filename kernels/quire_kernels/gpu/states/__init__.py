# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for layers with one state per sequence. They compute the sequences that decode; see `state_batch`."""
