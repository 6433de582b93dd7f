# SPDX-License-Identifier: Apache-2.0
"""The controller of LLMServices.

The controller works in passes. Each pass observes one service, applies the changes that are missing and writes the
service's status.
"""
