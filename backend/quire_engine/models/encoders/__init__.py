# SPDX-License-Identifier: Apache-2.0
"""Encoders, in which all tokens of a sequence attend to each other."""
