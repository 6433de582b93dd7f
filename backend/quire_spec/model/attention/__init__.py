# SPDX-License-Identifier: Apache-2.0
"""Configurations of attention that is not the attention of Llama."""
