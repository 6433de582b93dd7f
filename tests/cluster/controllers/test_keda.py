# SPDX-License-Identifier: Apache-2.0
"""KEDA scales a service 1-0-1-0 by the queue of an endpoint picker, which holds the requests meanwhile. Everything but
the kubelet is real: KEDA, Prometheus, the picker, Envoy, and the server of the pod."""

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request

import pytest
import yaml
from support.controller_harness import ControllerHarness, llm_service
from support.controllers import running_keda, running_prometheus
from support.engine_processes import wait_for
from support.envoy import running_envoy
from support.picker import CRDS, ROUTERS, running_picker
from support.served_pods import ServedPods

pytestmark = pytest.mark.timeout(600)

QUEUE = "inference_extension_flow_control_queue_size"
POOL = {"targetPort": "openai", "endpointPicker": {"name": "picker"}}


def service(prometheus_url):
    trigger = {"type": "prometheus", "metricType": "AverageValue"}
    metadata = {"serverAddress": prometheus_url, "query": f'sum({QUEUE}{{inference_pool="tales"}})', "threshold": "8"}
    return llm_service(
        model={"source": {"pvc": {"claimName": "models", "path": "models/tiny"}}, "servedName": "tales"},
        networking={"inferencePool": POOL},
        autoscaling={
            "kind": "ScaledObject",
            "minReplicas": 0,
            "maxReplicas": 1,
            "scaleDownSeconds": 5,
            "pollingInterval": 1,
            "prometheusAddress": prometheus_url,
            "triggers": [trigger | {"metadata": metadata}],
        },
    )


def test_requests_wait_for_the_first_pod(cluster, namespace, kubelet, tmp_path):
    answers = []

    def send(number):
        body = {"model": "tales", "prompt": f"{number} Once", "max_tokens": 4}
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            answers.append((response.status, json.loads(response.read())["usage"]["completion_tokens"]))

    def scaled_to_zero():
        ready = operator.condition("Ready")
        return ready.get("reason") == "ScaledToZero" and operator.status()["replicas"] == 0

    config = yaml.safe_load((ROUTERS / "endpoint-picker.yaml").read_text())
    config |= {"featureGates": ["flowControl"], "flowControl": {"maxRequests": "1000", "defaultRequestTTL": "600s"}}
    config_file = tmp_path / "picker.yaml"
    config_file.write_text(yaml.safe_dump(config))
    with contextlib.ExitStack() as stack:
        for kind in CRDS:
            stack.enter_context(cluster.optional_kind(kind))
        stack.enter_context(running_keda(cluster, namespace, tmp_path))
        operator = stack.enter_context(ControllerHarness(cluster, namespace))
        # The pool exists before the autoscaler, whose queries need the picker, which needs the pool.
        document = service("http://127.0.0.1:1")
        pods = stack.enter_context(ServedPods(kubelet, document, tmp_path))
        pool = llm_service(**{**document["spec"], "autoscaling": None})
        cluster.apply({**pool, "spec": {k: v for k, v in pool["spec"].items() if v is not None}}, namespace)
        wait_for(lambda: operator.condition("Ready").get("status") == "True", 120, operator.status)
        picker = stack.enter_context(running_picker(cluster, namespace, "tales", config_file, tmp_path))
        port = stack.enter_context(running_envoy([], tmp_path, picker.port))
        targets = [f"127.0.0.1:{picker.metrics_port}"]
        url = stack.enter_context(running_prometheus(cluster, namespace, targets, tmp_path))
        send(0)
        cluster.apply(service(url), namespace)
        wait_for(scaled_to_zero, 120, operator.status)
        assert operator.condition("Autoscaling")["status"] == "True"
        wait_for(lambda: picker.value("inference_pool_ready_pods") == 0 and not pods.running, 60, "no pods")
        with pytest.raises(urllib.error.HTTPError, match="500"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30)
        started = time.monotonic()
        clients = [threading.Thread(target=send, args=(number,)) for number in range(1, 4)]
        for client in clients:
            client.start()
        wait_for(lambda: picker.value(QUEUE) == 3, 30, "requests in the queue of the picker")
        assert answers == [(200, 4)]
        for client in clients:
            client.join(240)
        print(f"{time.monotonic() - started:.1f} s from the first request to the last answer")
        assert answers == [(200, 4)] * 4
        assert operator.status()["replicas"] == 1
        wait_for(scaled_to_zero, 120, operator.status)
