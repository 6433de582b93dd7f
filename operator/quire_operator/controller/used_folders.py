# SPDX-License-Identifier: Apache-2.0
"""The folders of a service's claim that pods use. A download Job removes all other revisions. Pure.

A pod reads the folder from the ConfigMap with its configuration, so the folders of all pods are known from the
ConfigMaps that they mount.
"""

import re
from collections.abc import Iterator

from quire_operator.controller.object_cache import ObjectCache, ServiceKey
from quire_operator.controller.template_revision import mounted_configmaps, workload_template
from quire_operator.kube import resources
from quire_operator.render import object_names

_NAME = "([0-9a-f]{7})"
_OWN_FOLDER = re.compile(f"{object_names.MODEL_DIR}/{_NAME}")


def used_folders(cache: ObjectCache, key: ServiceKey) -> frozenset[str] | None:
    """Return the names of the folders on the claim of a service that pods use, or will use when they start.

    Pods of other services that have this claim as their source count too. If it is not known what a pod uses, return
    None.
    """
    claim_folder = re.compile(f"{object_names.CLAIMS_DIR}/{object_names.model_claim(key[1])}/{_NAME}")
    texts = {
        entry.name: entry.raw_json.decode()
        for entry in cache.objects_of_kind(resources.CONFIG_MAP)
        if entry.namespace == key[0]
    }
    folders = {folder for text in texts.values() for folder in claim_folder.findall(text)}
    for configmaps in _configmaps_of_pods(cache, key):
        pod_folders = {folder for name in configmaps for folder in _OWN_FOLDER.findall(texts.get(name, ""))}
        if not configmaps <= texts.keys() and not pod_folders:
            return None
        folders |= pod_folders
    return frozenset(folders)


def _configmaps_of_pods(cache: ObjectCache, key: ServiceKey) -> Iterator[set[str]]:
    """Yield the names of the ConfigMaps that each pod mounts, or each template from which pods can still be made."""
    for entry in cache.children_of(key, resources.POD, resources.REPLICA_SET, *resources.WORKLOADS):
        spec = entry.body().get("spec", {})
        if entry.resource is resources.POD:
            yield mounted_configmaps(spec)
        elif entry.resource is not resources.REPLICA_SET or spec.get("replicas"):
            yield mounted_configmaps(workload_template(spec).get("spec", {}))
