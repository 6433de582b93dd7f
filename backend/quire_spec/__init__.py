# SPDX-License-Identifier: Apache-2.0
"""Definitions that all packages of Quire share: the configuration, names, messages between processes, and documents.
Standard library only."""
