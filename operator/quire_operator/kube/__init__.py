# SPDX-License-Identifier: Apache-2.0
"""Kubernetes: a small client of the API server, and the kinds that the operator deals with."""
