# SPDX-License-Identifier: Apache-2.0
"""Pinned: the pods that a Deployment was made for, kept with it, so that a new release of the operator, which may
render them differently, leaves them alone until the spec, the model or the GPU changes. Pure.

Kept in an annotation, compressed: about 2 KB. The live template would not do: it has the server's defaults in it, and
whatever somebody changed by hand, which is to be undone.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire_operator import crd, schema
from quire_operator.plan.plan import Plan
from quire_operator.reconcile.packed import pack, unpack
from quire_operator.render import names
from quire_operator.service import LLMService
from quire_spec import constants as spec_names

ANNOTATION = f"{spec_names.API_GROUP}/pods"

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a Deployment's pods were rendered from, and into what."""

    spec: str
    """`spec_digest` of the service."""
    plan: str
    """Plan.inputsHash."""
    template: Manifest
    engine: Manifest
    """The ConfigMap of engine.json, without owner and namespace."""

    @classmethod
    def of(cls, service_digest: str, plan: Plan, manifests: Iterable[Manifest]) -> Self:
        """What was rendered just now."""
        by_kind: dict[str, list[Manifest]] = {}
        for manifest in manifests:
            by_kind.setdefault(manifest["kind"], []).append(manifest)
        (deployment,) = by_kind["Deployment"]
        template = deployment["spec"]["template"]
        used = config_maps(template["spec"])
        engine = next(m for m in by_kind["ConfigMap"] if m.get("immutable") and m["metadata"]["name"] in used)
        meta = {key: engine["metadata"][key] for key in ("name", "labels")}
        return cls(service_digest, plan.inputsHash, template, {**engine, "metadata": meta})

    @classmethod
    def read(cls, deployment: Mapping[str, Any] | None) -> Self | None:
        """From a Deployment; None when it has none that can be read."""
        text = (deployment or {}).get("metadata", {}).get("annotations", {}).get(ANNOTATION)
        if not text:
            return None
        try:
            body = unpack(text)
            return cls(body["spec"], body["plan"], body["template"], body["engine"])
        except (ValueError, KeyError, TypeError):
            # Somebody changed it by hand: the pods are rendered anew.
            return None

    @property
    def text(self) -> str:
        """The annotation; the same for the same content."""
        return pack({"spec": self.spec, "plan": self.plan, "template": self.template, "engine": self.engine})

    def into(self, manifests: Iterable[Manifest]) -> list[Manifest]:
        """Manifests with the pods that are kept here in the place of those that were rendered."""
        result = []
        for manifest in manifests:
            if manifest["kind"] == "Deployment":
                meta = manifest["metadata"]
                annotations = {**meta.get("annotations", {}), names.PLAN: self.plan, ANNOTATION: self.text}
                manifest = {
                    **manifest,
                    "metadata": {**meta, "annotations": annotations},
                    "spec": {**manifest["spec"], "template": self.template},
                }
            elif manifest["kind"] == "ConfigMap" and manifest.get("immutable"):
                manifest = {**self.engine, "metadata": {**manifest["metadata"], **self.engine["metadata"]}}
            result.append(manifest)
        return result


def spec_digest(body: Mapping[str, Any], service: LLMService) -> str:
    """Digest of the parts of a spec that pods follow from, of a body that crd.check completed.

    Values that are the schema's default are left out: a field that a later release adds must not change it.
    """
    fields = crd.load()["properties"]["spec"]
    spec = schema.sparse(fields, body["spec"])
    sources = [service.spec.model.source, *(adapter.source for adapter in service.spec.adapters)]
    facts = {name: spec[name] for name in _POD_FIELDS if name in spec}
    facts["cache"] = {k: v for k, v in spec.get("cache", {}).items() if k in ("mode", "size")}
    facts["drainSeconds"] = spec.get("rollout", {}).get("drainSeconds")
    facts["claims"] = sorted({source.pvc.claimName for source in sources if source.pvc})
    text = json.dumps({k: v for k, v in facts.items() if v}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def config_maps(pod_spec: Mapping[str, Any]) -> set[str]:
    """Names of the ConfigMaps that a pod mounts."""
    volumes = pod_spec.get("volumes") or ()
    return {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}


_POD_FIELDS = ("device", "model", "lora", "engine", "runtime", "gpu", "security", "podTemplate")
