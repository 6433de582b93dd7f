# SPDX-License-Identifier: Apache-2.0
"""The LLMService resource: reading, checking, and running it on one machine. Never imports torch."""
