# SPDX-License-Identifier: Apache-2.0
"""The folders that a download keeps: every folder from which a pod reads, or can read when it starts."""

import json

from hypothesis import given
from hypothesis import strategies as st

from quire_operator.controller.object_cache import ObjectCache
from quire_operator.controller.used_folders import used_folders
from quire_operator.kube import resources
from quire_operator.render import object_names

NAMESPACE, NAME = "team", "tales"
FOLDERS = ("aaaaaaa", "bbbbbbb", "ccccccc", "ddddddd")


def metadata(name, service=NAME):
    labels = {object_names.INSTANCE: service, object_names.MANAGED_BY: object_names.MANAGER}
    return {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "resourceVersion": "1", "labels": labels}


def engine_configmap(folder, draft=None):
    config = {"engine": {"model": f"/mnt/model/{folder}", **({"draft": f"/mnt/model/{draft}"} if draft else {})}}
    return {"metadata": metadata(f"tales-engine-{folder}"), "data": {"pod.json": json.dumps(config, indent=2)}}


def pod_spec(folder):
    names = (f"tales-engine-{folder}", "tales-adapters", "chat-template-of-a-user")
    return {"containers": [], "volumes": [{"name": name, "configMap": {"name": name}} for name in names]}


def template(folder, replicas):
    return {"replicas": replicas, "template": {"spec": pod_spec(folder)}}


holders = st.tuples(st.sampled_from(["Pod", "ReplicaSet", "Deployment"]), st.sampled_from(FOLDERS), st.integers(0, 2))


@given(st.lists(holders, max_size=8), st.sets(st.sampled_from(FOLDERS)))
def test_no_folder_of_a_pod_is_ever_missing(found, missing):
    """`missing` are the folders whose ConfigMap is not in the cache."""
    cache = ObjectCache()
    for folder in {*FOLDERS} - missing:
        cache.upsert(resources.CONFIG_MAP, engine_configmap(folder))
    needed = set()
    for i, (kind, folder, replicas) in enumerate(found):
        meta = metadata(NAME if kind == "Deployment" else f"tales-{i}")
        if kind == "Pod":
            cache.upsert(resources.POD, {"metadata": meta, "spec": pod_spec(folder)})
            needed.add(folder)
        elif kind == "ReplicaSet":
            cache.upsert(resources.REPLICA_SET, {"metadata": meta, "spec": template(folder, replicas)})
            needed |= {folder} if replicas else set()
        else:
            cache.upsert(resources.DEPLOYMENT, {"metadata": meta, "spec": template(folder, replicas)})
    deployment = cache.get_body(resources.DEPLOYMENT, NAMESPACE, NAME)
    if deployment is not None:
        (folder,) = [name for name in FOLDERS if name in json.dumps(deployment)]
        needed.add(folder)
    assert used_folders(cache, (NAMESPACE, NAME)) == (None if needed & missing else needed)


def test_draft_models_and_services_that_read_this_claim_count():
    cache = ObjectCache()
    cache.upsert(resources.CONFIG_MAP, engine_configmap("aaaaaaa", draft="bbbbbbb"))
    cache.upsert(resources.POD, {"metadata": metadata("tales-0"), "spec": pod_spec("aaaaaaa")})
    other = {"metadata": metadata("other-engine", "other"), "data": {"pod.json": "/mnt/claims/tales-models/ccccccc"}}
    cache.upsert(resources.CONFIG_MAP, other)
    unrelated = {"metadata": metadata("x-engine", "x"), "data": {"pod.json": "/mnt/model/ddddddd"}}
    cache.upsert(resources.CONFIG_MAP, unrelated)
    assert used_folders(cache, (NAMESPACE, NAME)) == {"aaaaaaa", "bbbbbbb", "ccccccc"}
