#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A kind cluster with the images of this checkout, where there is Docker: hack/kind.sh [up|e2e|down]
#   up     cluster "quire" with both images loaded (default); prints the next commands
#   e2e    up, and the tests of `make e2e` against it
#   down   delete the cluster
# `make e2e` runs the same tests without Docker, on a node of hack/nodocker_cluster.
set -euo pipefail
cd "$(dirname "$0")/.."
kubeconfig=${XDG_CACHE_HOME:-$HOME/.cache}/quire/kind.kubeconfig

up() {
  for program in docker kind kubectl; do
    command -v "$program" > /dev/null || { echo "kind.sh: $program is not installed" >&2; exit 1; }
  done
  mkdir -p "$(dirname "$kubeconfig")"
  kind get clusters | grep -qx quire || kind create cluster --name quire --kubeconfig "$kubeconfig" --config - << EOF
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes:
- role: control-plane
  extraMounts: [{hostPath: $PWD/examples, containerPath: /examples, readOnly: true}]
EOF
  docker build -f operator/Dockerfile -t localhost/quire-operator:e2e .
  docker build -f backend/Dockerfile --target cpu -t localhost/quire:e2e .
  kind load docker-image --name quire localhost/quire-operator:e2e localhost/quire:e2e
  echo "export KUBECONFIG=$kubeconfig"
  echo "helm install quire charts/quire -n quire-system --create-namespace --wait" \
    "--set image.registry=localhost,image.operator.tag=e2e,image.cpu.tag=e2e"
}

case ${1:-up} in
  up) up ;;
  e2e) up && QUIRE_PODS=1 QUIRE_TEST_KUBECONFIG=$kubeconfig .venv/bin/python -m pytest -q tests/pods ;;
  down) kind delete cluster --name quire ;;
  *) sed -n '3,8s/^# //p' "$0"; exit 2 ;;
esac
