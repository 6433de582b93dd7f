# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes on this machine, for tests and for people: programs, control plane, node, images. No container
engine is needed. `python -m nodocker_cluster --help` in hack/, or `make cluster-tools cluster-up cluster-down e2e`."""
