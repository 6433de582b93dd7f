# SPDX-License-Identifier: Apache-2.0
"""The planner: computes the engine's settings from a model, a GPU and a spec. Pure, except for reading files."""
