# SPDX-License-Identifier: Apache-2.0
"""The operator with a thousand LLMServices: time until all objects exist, and the cost of an idle operator.

    python tests/bench/reconcile.py [--services 1000] [--quiet-seconds 60] [--base FOLDER]

It uses a real API server with etcd and controllers, but no kubelet: pods stay pending and are not measured. The models
of all services are on one claim; one Job for all reads config.json, and this script writes the result of its pod. The
operator is `quire operate`, a separate process. With --base, the operator of another tree, which has an environment of
its own in `.venv`, first does the same in a cluster of its own, and the ratios of the CPU time and memory are limited.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "hack")]

from support.cluster import running_cluster  # noqa: E402
from support.controller_harness import CHILDREN, TINY, llm_service  # noqa: E402

from quire_server.downloads.inspect_model import termination_message  # noqa: E402

API, KIND = "quire.dev/v1alpha1", "LLMService"
NAMESPACE = "bench"
_MERGE = "application/merge-patch+json"
_MAX_RATIOS = {"CPU seconds": 1.15, "RSS in MB": 1.2}
_LIMITS = {"seconds until all is there": 120, "writes/s when quiet": 2, "% of a core when quiet": 5, "RSS in MB": 250}


def main() -> int:
    """Run the benchmark; exit with status 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--quiet-seconds", type=float, default=60)
    parser.add_argument("--base", type=Path, help="tree to compare with")
    options = parser.parse_args()
    base = {} if options.base is None else run(options.base.resolve(), options)
    figures = run(ROOT, options)
    held = all(figures[name] < limit for name, limit in _LIMITS.items())
    for name, limit in _MAX_RATIOS.items() if base else ():
        ratio = figures[name] / base[name]
        held &= ratio <= limit
        print(f"{name:<28} {base[name]:8.2f} before, ratio {ratio:.2f}   bar {limit}")
    return 0 if held else 1


def run(tree: Path, options: argparse.Namespace) -> dict[str, float]:
    """Start a cluster and the operator of a tree, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder, running_cluster(Path(folder)) as cluster:
        cluster.apply_crd(yaml.safe_load((tree / "crds/llmservices.yaml").read_text()))
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        started = time.monotonic()
        create_services(cluster, options.services)
        print(f"{options.services} services applied in {time.monotonic() - started:.1f} s")
        return measure(cluster, Path(folder), tree, options)


def create_services(cluster, count: int) -> None:
    """Apply the services before the operator starts, so that it finds all of them at once."""
    with ThreadPoolExecutor(8) as threads:
        names = [f"s{number:04d}" for number in range(count)]
        list(threads.map(lambda name: cluster.apply(llm_service(name), NAMESPACE), names))


def measure(cluster, folder: Path, tree: Path, options: argparse.Namespace) -> dict[str, float]:
    """Start the operator, wait, print the measurements, and return them."""
    argv = [str(tree / ".venv/bin/quire"), "operate", f"--kubeconfig={cluster.kubeconfig}"]
    argv += ["--host=127.0.0.1", "--port=18089", "--liveness-port=0", "--log-level=warning"]
    with (folder / "operator.log").open("wb") as log:
        started = time.monotonic()
        operator = subprocess.Popen(argv, stderr=log)
    try:
        report_model(cluster, started)
        done = wait_reconciled(cluster, options.services, started)
        cpu = cpu_seconds(operator.pid)
        settled_s = wait_idle(started)
        before, cpu_before, idle_since = writes_by_kind(), cpu_seconds(operator.pid), time.monotonic()
        time.sleep(options.quiet_seconds)
        elapsed = time.monotonic() - idle_since
        idle_writes = {
            name: count - before.get(name, 0)
            for name, count in writes_by_kind().items()
            if count != before.get(name, 0)
        }
        figures = {
            "seconds until all is there": done,
            "CPU seconds": cpu,
            "writes/s when quiet": sum(idle_writes.values()) / elapsed,
            "% of a core when quiet": 100 * (cpu_seconds(operator.pid) - cpu_before) / elapsed,
            "RSS in MB": rss_mb(operator.pid),
        }
        latency = reconcile_percentiles()
    finally:
        operator.send_signal(signal.SIGTERM)
        operator.wait(30)
    log = (folder / "operator.log").read_text()
    print(f"a pass: p50 {latency[0]} s, p99 {latency[1]} s (buckets)")
    print(f"Kubernetes' own controllers and scheduler were done after {settled_s:.1f} s")
    print(f"writes when quiet: {idle_writes or 'none'}")
    for name, value in figures.items():
        limit = _LIMITS.get(name, math.inf)
        print(f"{name:<28} {value:8.2f}   bar {limit}   {'held' if value < limit else 'MISSED'}")
    print(log[-2000:], file=sys.stderr)
    return figures


def report_model(cluster, started: float) -> None:
    """Act as the kubelet for the pod that reads the claim."""
    while True:
        pods = cluster.items("v1", "Pod", NAMESPACE, labelSelector="app.kubernetes.io/component=model-reader")
        if pods:
            break
        assert time.monotonic() - started < 60, "no pod that reads the model"
        time.sleep(0.1)
    terminated = {"exitCode": 0, "message": termination_message(TINY), "reason": "Completed"}
    state = {
        "name": "read",
        "image": "",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": terminated},
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pods[0]['metadata']['name']}/status"
    cluster.request("PATCH", path, {"status": {"phase": "Succeeded", "containerStatuses": [state]}}, _MERGE)


def wait_reconciled(cluster, count: int, started: float) -> float:
    """Seconds until every service has all children and a current status."""
    while num_writes("Deployment") < count or num_writes("LLMService") < count:
        assert time.monotonic() - started < 600, f"after 600 s: {writes_by_kind()}"
        time.sleep(0.5)
    # Not earlier: listing so many objects costs the API server more than the measured work.
    while True:
        bodies = cluster.items(API, KIND, NAMESPACE)
        current = sum(b.get("status", {}).get("observedGeneration") == b["metadata"]["generation"] for b in bodies)
        planned = sum("plan" in b.get("status", {}) for b in bodies)
        if current == planned == count and all_children_exist(cluster, count):
            return time.monotonic() - started
        assert time.monotonic() - started < 600, f"{current} of {count} current, {planned} planned"
        time.sleep(1)


def wait_idle(started: float) -> float:
    """Return the seconds until there was no write for ten seconds. Deployments and pods change while Kubernetes creates
    them, and the operator writes each change of a service's state to its status."""
    last_writes, since = writes_by_kind(), time.monotonic()
    while time.monotonic() - since < 10:
        time.sleep(0.5)
        if (current_writes := writes_by_kind()) != last_writes:
            last_writes, since = current_writes, time.monotonic()
        assert time.monotonic() - started < 900, f"it never comes to rest: {last_writes}"
    return since - started


def all_children_exist(cluster, count: int) -> bool:
    """Return whether every service has every kind of child object."""
    for version, kind in CHILDREN:
        if kind == "Secret":
            path = f"/api/v1/namespaces/{NAMESPACE}/secrets"
            bodies = cluster.request("GET", path, labelSelector="app.kubernetes.io/managed-by=quire-operator")["items"]
        else:
            bodies = cluster.items(
                version, kind, NAMESPACE, labelSelector="app.kubernetes.io/managed-by=quire-operator"
            )
        if len(bodies) < count * (2 if kind in ("ConfigMap", "Service") else 1):
            return False
    return True


def scrape_metrics() -> dict[str, float]:
    """The operator's metrics, by name with labels."""
    with urlopen("http://127.0.0.1:18089/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def writes_by_kind() -> dict[str, float]:
    """Writes to the API server so far, by kind and verb."""
    prefix = "quire_operator_writes_total"
    return {name.removeprefix(prefix): value for name, value in scrape_metrics().items() if name.startswith(prefix)}


def num_writes(kind: str) -> float:
    """Writes of objects of a kind so far."""
    return sum(value for name, value in writes_by_kind().items() if f'"{kind}"' in name)


def reconcile_percentiles() -> tuple[str, str]:
    """Upper bounds of a pass's p50 and p99."""
    prefix = 'quire_operator_reconcile_seconds_bucket{le="'
    buckets = [(name[len(prefix) : -2], value) for name, value in scrape_metrics().items() if name.startswith(prefix)]
    total = buckets[-1][1]
    p50, p99 = (next(bound for bound, value in buckets if value >= share * total) for share in (0.5, 0.99))
    return p50, p99


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    line = next(li for li in Path(f"/proc/{pid}/status").read_text().splitlines() if li.startswith("VmRSS"))
    return int(line.split()[1]) / 1000


if __name__ == "__main__":
    print(json.dumps({"command": sys.argv}))
    sys.exit(main())
