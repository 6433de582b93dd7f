# SPDX-License-Identifier: Apache-2.0
"""Predicts the latencies of a service from a recording of its engine: `python -m quire_engine.simulation`."""
