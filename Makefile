# SPDX-License-Identifier: Apache-2.0
# Everything that people and CI run. `make help` lists it.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
EMULATED ?= .venv-emulated
# At most two threads per process in tests, because tests start several processes.
export OMP_NUM_THREADS ?= 2
# Waiting OpenMP threads do not spin: that would take cores from threads that have work.
test test-server test-cluster test-controllers test-kernels test-arm64 test-tools test-hostile test-torch-min e2e: export OMP_WAIT_POLICY ?= passive
PYTEST = $(BIN)/python -m pytest -q --durations=10
# Three test files at a time on two cores, because tests wait for servers and timers half of the time. In file order, so
# that the long ones of tests/cluster, tests/e2e and tests/engine are not the last.
SIDE_BY_SIDE = -n 3 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: cpu-kernels help demo demo-env dev-env emulated-env doctor test test-server test-cluster test-controllers test-kernels test-arm64 test-tools test-hostile test-clients clients-env test-torch-min bench lint types contracts prose commits hooks check generated format release clean cluster-tools cluster-up cluster-down cluster-images cluster-load e2e rollouts emulated
# A Kubernetes cluster for tests and manual use: hack/nodocker_cluster. IPV6=1: IPv6 only. KUBERNETES=v1.34.4: this
# version instead of the pinned one.
export QUIRE_CLUSTER_IPV6 ?= $(IPV6)
export QUIRE_KUBERNETES ?= $(KUBERNETES)
CLUSTER = PYTHONPATH=hack $(BIN)/python -m nodocker_cluster

help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  \033[1m%-16s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: demo-env ## demo: a real server, the tiny model, three adapters, requests over HTTP, gRPC and the OpenAI API
	@$(BIN)/python hack/demo.py

test: cpu-kernels ## test all packages without a server or Kubernetes, and list each skipped test (WHAT="path or -k name")
	@$(PYTEST) $(SIDE_BY_SIDE) $(or $(WHAT),-m "not server" --ignore=tests/kernels/gpu \
		tests/spec tests/sources tests/kernels tests/engine tests/server tests/operator tests/test_repo.py)

test-server: cpu-kernels ## test real Triton servers: quire serve, its clients, hostile input, killed processes
	@$(PYTEST) $(SIDE_BY_SIDE) -m server tests/e2e tests/server

test-cluster: cpu-kernels $(if $(KUBERNETES),cluster-tools) ## test the operator and the chart with a real Kubernetes API server (KUBERNETES=v1.34.4: another version)
	@# Not side by side on an existing cluster, where two operators would interfere.
	@$(PYTEST) $(if $(QUIRE_TEST_KUBECONFIG),,$(SIDE_BY_SIDE)) tests/cluster --ignore=tests/cluster/controllers

test-controllers: cpu-kernels cluster-tools ## test the operator beside real KEDA, Prometheus and Kueue (minutes to build, once; not in CI)
	@$(CLUSTER) controllers
	@$(PYTEST) -s $(or $(WHAT),tests/cluster/controllers)

test-kernels: dev-env ## test the GPU kernels without a GPU: in Triton's interpreter, and compiled for sm_90
	@$(PYTEST) $(SIDE_BY_SIDE) tests/kernels/gpu

test-arm64: dev-env ## test the CPU kernels of ARM64 in qemu (needs g++-aarch64-linux-gnu and qemu-user)
	@# Without the tests of the build itself, which run with the compiler of this machine in `make test`.
	@PYTHONPATH=tests $(PYTEST) -p support.emulated_kernels --ignore=tests/kernels/gpu -k "not (library or folder or build)" $(or $(WHAT),tests/kernels)

test-tools: cpu-kernels ## test the tools: the benchmarks, the measuring of a GPU with faults on this CPU, the tiny model
	@# Not side by side: these tests start programs that use all cores, and run beside `make emulated` in CI.
	@$(PYTEST) tests/hack

test-hostile: cpu-kernels ## attack every port of quire serve beside a client that streams (HOSTILE="--seconds 120": a sample)
	@$(BIN)/python tests/hostile/run.py $(HOSTILE)

test-clients: clients-env ## openai's, anthropic's, LangChain's and LiteLLM's clients, and routers, against quire serve; from environments of their own
	@PYTHONPATH=tests:hack $(BIN)/python tests/clients/run.py

clients-env: dev-env
	@PYTHONPATH=tests:hack $(BIN)/python tests/clients/run.py --install-only

cpu-kernels: dev-env
	@# Before the first server starts, which would wait for the compiler (30 s on processors with AVX2 only).
	@$(BIN)/python -c 'from quire_kernels.cpu_native import load_library; load_library()'

bench: dev-env ## measure serving on a quiet machine: this engine, the server, transformers (BENCH="--help" explains)
	@env -u OMP_NUM_THREADS $(BIN)/python tests/bench/serving.py --shape 135m $(BENCH)

emulated: emulated-env ## the GPU path without a GPU: PyTorch's CUDA build on an emulated device (minutes; WHAT="path or -k name")
	@PYTHONPATH=tests:hack $(EMULATED)/bin/python -m emulator -m pytest -p emulator.plugin -q --durations=5 $(or $(WHAT),tests/emulated)

test-torch-min: emulated-env ## test the engine on a CPU with the lowest PyTorch that is supported
	@# Of the comparisons with transformers, those of each family. What the scheduler does with them is in `make test`.
	@$(EMULATED)/bin/python -m pytest -q --durations=5 $(or $(WHAT),-k "not test_parity or equal_transformers or in_one_batch" \
		tests/engine/core/test_parity.py tests/engine/weights tests/kernels/test_ops.py tests/kernels/test_sampling.py)

cluster-tools: ## find, download or build Kubernetes, Helm and the endpoint picker for the tests (minutes, once)
	@# With the machine's own Python, so that the build can run while pip installs .venv.
	@PYTHONPATH=hack $(PYTHON) -m nodocker_cluster tools

cluster-up: dev-env ## start Kubernetes with one node on this machine, without Docker (node: root on Debian; IPV6=1)
	@$(CLUSTER) up

cluster-images: dev-env ## build this checkout's images for it (make cluster-load puts them on its node)
	@$(CLUSTER) images

cluster-load: dev-env
	@$(CLUSTER) load

e2e: cluster-tools cluster-images ## test real pods: the chart, an LLMService, tokens, on a new node (root on Debian; IPV6=1)
	@QUIRE_PODS=1 $(PYTEST) $(or $(WHAT),tests/pods)

rollouts: cluster-tools cluster-images ## change, scale and evict two real pods under load, in which no request fails (RUNS=10)
	@QUIRE_PODS=1 QUIRE_ROLLOUT_RUNS=$(or $(RUNS),1) $(PYTEST) -s tests/pods/test_rollouts.py

cluster-down: dev-env ## stop the cluster of make cluster-up, with everything on it
	@$(CLUSTER) down

check: lint types contracts prose commits ## lint, types, import contracts, prose and commit subjects

lint: dev-env ## ruff: style and formatting
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: dev-env ## mypy --strict
	@$(BIN)/mypy

contracts: dev-env ## import-linter: who may import whom
	@$(BIN)/lint-imports

prose: ## phrases that make text hard to read: docs, docstrings, comments, messages
	@$(PYTHON) hack/prose.py

commits: ## commit subjects follow `scope: imperative summary`
	@$(PYTHON) hack/commits.py

hooks: ## install the git hook that checks each commit message
	@printf '#!/bin/sh\nexec python3 hack/commits.py --message "$$1"\n' > .git/hooks/commit-msg && chmod +x .git/hooks/commit-msg

format: dev-env ## format and fix what ruff can
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

generated: dev-env ## write the CRD, docs/llmservice-reference.md and the table of docs/models.md
	@$(BIN)/python hack/generated.py

release: dev-env ## write the wheel with SBOM and provenance to dist/ (IMAGES=registry.example/org: also images for amd64 and arm64)
	@$(BIN)/python hack/release.py $(if $(IMAGES),--images $(IMAGES))

doctor: ## report missing requirements, and install nothing
	@$(PYTHON) hack/bootstrap.py --check-only

demo-env:
	@$(PYTHON) hack/bootstrap.py --for demo --venv $(VENV)

dev-env:
	@$(PYTHON) hack/bootstrap.py --for dev --venv $(VENV)

emulated-env:
	@$(PYTHON) hack/bootstrap.py --for emulated --venv $(EMULATED)

clean: ## remove the environment and all caches
	@rm -rf $(VENV) $(EMULATED) .venv-clients .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
