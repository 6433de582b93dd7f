# SPDX-License-Identifier: Apache-2.0
"""The catalog that pods get while new contents of adapters are being verified. Pure.

The ConfigMap of the adapters is the record of what is live. If the spec gives an adapter another content, the pods
first get it as a candidate beside the live one. When every ready pod has verified the candidate, it becomes live in all
pods with one push, and the content that it replaces stays loaded as the previous one. If a pod cannot verify it,
nothing switches. A pod that starts reads the ConfigMap, so it gets the live content.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from quire_operator.controller.status.observed_state import PodState
from quire_operator.controller.status.rollout import is_ready
from quire_spec.documents.adapter_catalog import AdapterCatalog, AdapterContent, AdapterSpec
from quire_spec.documents.pod_status import AdapterState


def stage_catalog(
    desired: AdapterCatalog, live: AdapterCatalog | None, pods: Sequence[PodState], claims: AbstractSet[str]
) -> AdapterCatalog:
    """Return the catalog for the pods.

    Args:
        desired: the catalog of the spec.
        live: the catalog in the ConfigMap; None if there is none.
        pods: the server pods. With their reports, candidates that all ready pods have verified become live.
        claims: the claims that pods of the spec mount, apart from those of adapters that are not in `live`.
    """
    if live is None:
        return desired
    live_by_name = {adapter.name: adapter for adapter in live.adapters}
    adapters = (_stage(adapter, live_by_name.get(adapter.name), live, pods, claims) for adapter in desired.adapters)
    return replace(desired, adapters=tuple(adapters))


def _stage(
    desired: AdapterSpec,
    live: AdapterSpec | None,
    catalog: AdapterCatalog,
    pods: Sequence[PodState],
    claims: AbstractSet[str],
) -> AdapterSpec:
    if live is None or desired.versions or live.versions:
        # Versions serve side by side: a pod gives requests to those that it has verified.
        return desired
    if desired.content == live.content:
        return replace(desired, previous=_readable(live.previous, claims))
    previous = _readable(live.content, claims)
    if previous is None or _readable(desired.content, claims) is None or not pods:
        # Pods that are replaced, because they need another claim, cannot hold both contents.
        return replace(desired, previous=previous)
    staged = replace(desired, source=live.source, canary=live.canary, candidate=desired.content, previous=live.previous)
    ready = [pod for pod in pods if is_ready(pod)]
    if staged == live and ready and all(_has_verified(pod, staged.name, catalog) for pod in ready):
        return replace(desired, previous=previous)
    return staged


def _has_verified(pod: PodState, name: str, catalog: AdapterCatalog) -> bool:
    if pod.report is None or pod.report.catalogue != catalog.version.digest:
        return False
    return any(
        adapter.name == name and adapter.candidate is not None and adapter.candidate.state is AdapterState.VERIFIED
        for adapter in pod.report.adapters
    )


def _readable(content: AdapterContent | None, claims: AbstractSet[str]) -> AdapterContent | None:
    """Return the content if pods can read it; None if they do not mount its claim."""
    if content is None or (content.source.pvc is not None and content.source.pvc.claimName not in claims):
        return None
    return content
