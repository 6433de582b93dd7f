# SPDX-License-Identifier: Apache-2.0
"""Renders the Kubernetes objects of an LLMService from its spec and plan. Pure."""
