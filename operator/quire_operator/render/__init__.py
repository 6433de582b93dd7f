# SPDX-License-Identifier: Apache-2.0
"""From an LLMService and its plan to Kubernetes objects. Pure but for command.py."""
