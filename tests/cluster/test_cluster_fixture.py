# SPDX-License-Identifier: Apache-2.0
"""Where tests get their cluster from: the one that is given, one of their own, or none with a plain word."""

import os
import subprocess
import sys

import pytest
import yaml
from support.cluster import KUBECONFIG_VARIABLE, ROOT, ApiError, running_cluster

READ_PODS = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]


def test_a_given_kubeconfig_is_used_and_nothing_is_started(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv(KUBECONFIG_VARIABLE, str(cluster.kubeconfig))
    with running_cluster(tmp_path) as given:
        assert given.programs is None
        assert given.version == cluster.version
        assert given.access.server == cluster.access.server
        given.install_crd()
    assert list(tmp_path.iterdir()) == []


def test_without_any_the_tests_say_what_to_run(tmp_path):
    """As people see it: no failure, and no test that passed on nothing."""
    bare = {k: v for k, v in os.environ.items() if k not in (KUBECONFIG_VARIABLE, "KUBEBUILDER_ASSETS")}
    argv = [sys.executable, "-m", "pytest", "-q", "-rs", "tests/cluster/test_crd.py", "-p", "no:cacheprovider"]
    environment = bare | {"QUIRE_CLUSTER_CACHE": str(tmp_path)}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert done.returncode == 0, done.stdout
    assert lines
    assert all("run make cluster-tools" in line for line in lines)
    assert "passed" not in done.stdout


def test_a_service_account_may_do_what_its_rules_say_and_no_more(cluster, namespace, tmp_path):
    kubeconfig = cluster.service_account(namespace, "reader", READ_PODS)
    assert kubeconfig.stat().st_mode & 0o077 == 0
    user = yaml.safe_load(kubeconfig.read_text())["users"][0]["user"]
    assert set(user) == {"token"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KUBECONFIG_VARIABLE, str(kubeconfig))
        with running_cluster(tmp_path) as reader:
            assert reader.items("v1", "Pod", namespace) == []
            with pytest.raises(ApiError, match="403"):
                reader.items("v1", "Secret", namespace)
            with pytest.raises(ApiError, match="403"):
                reader.items("v1", "Pod", "kube-system")
