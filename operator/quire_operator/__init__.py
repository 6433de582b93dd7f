# SPDX-License-Identifier: Apache-2.0
"""The LLMService resource: validation, planning, rendering, `quire serve` and the operator. Never imports torch."""
