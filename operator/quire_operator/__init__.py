# SPDX-License-Identifier: Apache-2.0
"""Validation, planning and rendering of LLMServices, the `quire` commands and the operator. Never imports torch."""
