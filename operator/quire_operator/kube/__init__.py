# SPDX-License-Identifier: Apache-2.0
"""A small client of the Kubernetes API server, and the resources that the operator reads and writes."""
