# SPDX-License-Identifier: Apache-2.0
"""The controller of LLMServices: each pass observes one service, applies missing changes and writes its status."""
