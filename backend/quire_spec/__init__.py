# SPDX-License-Identifier: Apache-2.0
"""Contracts that every package of Quire shares: configuration, names, messages, documents. Standard library only."""
