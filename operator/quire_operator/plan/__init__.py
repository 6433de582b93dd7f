# SPDX-License-Identifier: Apache-2.0
"""The planner: computes the engine's settings from a model, a GPU and a spec. The functions are pure, except those that
read files."""
