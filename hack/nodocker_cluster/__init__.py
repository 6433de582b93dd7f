# SPDX-License-Identifier: Apache-2.0
"""Development aid: a real Kubernetes cluster for machines without Docker. On a machine with Docker, use hack/kind.sh.

The package provides Kubernetes' programs, a control plane, one node, and image builds, for tests and for manual use.
Commands: `python -m nodocker_cluster --help` in hack/, or `make cluster-tools cluster-up cluster-down e2e`. Tests can
also use an existing cluster; the variable QUIRE_TEST_KUBECONFIG then contains the path of its kubeconfig.
"""
