# SPDX-License-Identifier: Apache-2.0
"""Encoders: models in which all tokens attend to each other, and which return vectors instead of texts."""
