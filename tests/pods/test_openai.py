# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API of real pods: keys from a Secret and their rotation, and KV blocks that a pod reads from another one.

The tests depend on each other and run in order, on one service.
"""

import base64
import json

import openai
import pytest
from support.engine_processes import wait_for
from support.pod_cluster import (
    create_examples_volume,
    current_condition,
    diagnostics,
    example_service,
    get_service,
    server_container,
    service_endpoint,
    serving_pods,
)

from quire_spec.net.addresses import format_for_url

SECRET = "api-keys"
ROTATION_S = 150
"""The kubelet updates mounted Secrets at least every 2 minutes."""


@pytest.fixture(scope="module")
def namespace(cluster, operator):
    """A namespace with examples/kind/tales.yaml on two pods, with an API key, Ready."""
    if not cluster.programs:
        pytest.skip("kubectl port-forward reaches one pod only; the Service's own address is needed")
    openai_spec = {"apiKeysSecretRef": {"name": SECRET}}
    engine = {"kvCacheOffloading": {"memory": "64Mi"}, "kvTransfer": {}}
    body = example_service(replicas=2, rollout={"drainSeconds": 20}, openai=openai_spec, engine=engine)
    with cluster.namespace("openai") as name:
        create_examples_volume(cluster, name)
        write_keys(cluster, name, first="key-1")
        cluster.kubectl("apply", "--filename=-", namespace=name, stdin=json.dumps(body))
        try:
            wait_for(lambda: is_ready(cluster, name), 400, "Ready")
        except AssertionError as error:
            raise AssertionError(f"{get_service(cluster, name).get('status')}\n{diagnostics(cluster, name)}") from error
        yield name


def write_keys(cluster, namespace, **keys):
    data = {name: base64.b64encode(key.encode()).decode() for name, key in keys.items()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "data": data}
    cluster.kubectl("apply", "--filename=-", namespace=namespace, stdin=json.dumps(secret))


def is_ready(cluster, namespace):
    return current_condition(cluster, namespace, "Ready").get("status") == "True"


def client(address, key):
    """Return a client without retries of one address; a Service or a pod."""
    host, port = address
    return openai.OpenAI(base_url=f"http://{format_for_url(host)}:{port}/v1", api_key=key, max_retries=0, timeout=60)


def accepts(address, key):
    try:
        with client(address, key) as caller:
            return bool(caller.models.list().data)
    except openai.AuthenticationError:
        return False


def pod_addresses(cluster, namespace):
    return [(pod["status"]["podIP"], 8004) for pod in serving_pods(cluster, namespace)]


def runs(cluster, namespace):
    """Return pod ids and restart counts."""
    return sorted((p["metadata"]["uid"], server_container(p)["restartCount"]) for p in serving_pods(cluster, namespace))


def test_pods_need_a_key_of_the_secret(cluster, namespace):
    status = get_service(cluster, namespace)["status"]
    assert status["address"]["url"] == f"http://tales.{namespace}.svc:8004/v1"
    with service_endpoint(cluster, namespace) as service:
        address = service.host, service.ports["openai"]
    assert accepts(address, "key-1") and not accepts(address, "key-2")
    with client(address, "key-1") as caller:
        plain, pirate = (
            caller.completions.create(model=model, prompt="Once upon a time", max_tokens=16, temperature=0)
            for model in ("tales", "pirate")
        )
    assert plain.choices[0].text and pirate.choices[0].text and plain.choices[0].text != pirate.choices[0].text


def test_a_pod_reads_kv_blocks_from_another_pod(cluster, namespace):
    holder, reader = pod_addresses(cluster, namespace)
    prompt = " ".join(f"On day {day}, Anna and Ben went to the forest." for day in range(20))
    texts, cached = [], []
    for address, headers in (
        (holder, {}),
        (reader, {"x-kv-cache-source-host-port": f"{format_for_url(holder[0])}:8005"}),
    ):
        with client(address, "key-1") as caller:
            answer = caller.completions.create(
                model="tales", prompt=prompt, max_tokens=16, temperature=0, extra_headers=headers
            )
        texts.append(answer.choices[0].text)
        details = answer.usage.prompt_tokens_details
        cached.append(details.cached_tokens if details else 0)
    assert texts[0] == texts[1]
    assert cached[0] == 0 < cached[1]


def test_rotated_keys_take_effect_without_a_restart(cluster, namespace):
    before = runs(cluster, namespace)
    write_keys(cluster, namespace, second="key-2")
    pods = pod_addresses(cluster, namespace)
    wait_for(lambda: all(accepts(pod, "key-2") for pod in pods), ROTATION_S, "the new key on each pod")
    assert not any(accepts(pod, "key-1") for pod in pods)
    assert runs(cluster, namespace) == before
