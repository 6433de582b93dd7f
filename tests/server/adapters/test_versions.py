# SPDX-License-Identifier: Apache-2.0
"""A pod loads and checks each version of an adapter, and publishes it under a name of its own."""

from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.pod_status import AdapterState
from quire_spec.errors import InvalidArgument


def set_versions(pod, generation, **versions):
    entries = [
        {"name": name, "source": {"path": str(folder)}, "weight": weight} for name, (folder, weight) in versions.items()
    ]
    document = {"generation": generation, "adapters": [{"name": "a", "versions": entries}]}
    pod.manager.set_catalog(AdapterCatalog.from_json(document))


async def test_each_version_is_published_with_its_weight(pod, one, two):
    set_versions(pod, 1, v1=(one, 90), v2=(two, 10))
    await pod.until(lambda: [v.state for v in pod.status("a").versions.values()] == [AdapterState.READY] * 2)
    await pod.until_states(a="Ready")
    status, published = pod.status("a"), pod.text.names("set_adapters")[-1]
    assert published["version_weights"] == {"a": {"v1": 90, "v2": 10}}
    digests = {name: content.digest for name, content in status.versions.items()}
    assert published["adapters"] == {"a": digests["v1"], "a@v1": digests["v1"], "a@v2": digests["v2"]}
    assert pod.server.names("load_model") == ["a"], "a version has no model of its own"
    loads = len(pod.core.names("load_adapter"))
    set_versions(pod, 2, v1=(one, 0), v2=(two, 1))
    await pod.until(lambda: pod.text.names("set_adapters")[-1]["version_weights"] == {"a": {"v1": 0, "v2": 1}})
    assert len(pod.core.names("load_adapter")) == loads, "a promotion loads nothing"


async def test_a_version_that_fails_is_named_and_the_others_serve(pod, one, two):
    set_versions(pod, 1, v1=(one, 1))
    await pod.until(lambda: pod.status("a").versions["v1"].state is AdapterState.READY)
    pod.core.errors["load_adapter"] = InvalidArgument("rank 64 exceeds 16")
    set_versions(pod, 2, v1=(one, 1), v2=(two, 1))
    await pod.until(lambda: pod.status("a").versions["v2"].state is AdapterState.FAILED)
    assert "rank 64" in pod.status("a").versions["v2"].error
    assert pod.text.names("set_adapters")[-1]["adapters"].keys() == {"a", "a@v1"}
    set_versions(pod, 3, v1=(one, 1))
    await pod.until(lambda: pod.manager.served_names() == {"a", "a@v1"} and not pod.manager.is_known("a@v2"))
