# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes cluster for development on machines without Docker. If the machine has Docker, use hack/kind.sh
instead.

The package gets the programs of Kubernetes, starts a control plane and one node, and builds images. Tests use it, and
developers can use it by hand. Commands: `python -m nodocker_cluster --help` in hack/, or `make cluster-tools cluster-up
cluster-down e2e`. Tests can also use an existing cluster; the variable QUIRE_TEST_KUBECONFIG then contains the path of
its kubeconfig.
"""
