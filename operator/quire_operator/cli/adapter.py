# SPDX-License-Identifier: Apache-2.0
"""`quire adapter`: changes an adapter of a service in a cluster. Called by cli/main.py.

The command edits the LLMService, as `kubectl edit` would. The operator then does what it does for every edit.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.cluster_config import ClusterConfig
from quire_operator.render import object_names
from quire_spec import constants
from quire_spec.errors import NotFound

Body = Mapping[str, Any]


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    if (args.action == "promote") != (args.version is not None):
        args.usage_error("promote requires NAME and VERSION, and rollback only NAME")
    config = ClusterConfig.from_environment(args.kubeconfig, args.context)
    print(asyncio.run(_change(config, args.namespace or config.namespace, args)))
    return 0


async def _change(config: ClusterConfig, namespace: str, args: argparse.Namespace) -> str:
    """Change an adapter; return a message.

    Raises:
        NotFound: no service, or several services, have the adapter, or it has no such content.
        ApiError: the API server rejected a request or did not respond.
    """
    async with ApiClient(config) as client:
        body, index = await _find_adapter(client, namespace, args.service, args.name)
        service, path = str(body["metadata"]["name"]), f"/spec/adapters/{index}"
        adapter = body["spec"]["adapters"][index]
        # If the list was edited in the meantime, the API server rejects the patch.
        patch = [{"op": "test", "path": path, "value": adapter}]
        if args.action == "promote":
            patch += _promote(path, adapter, args.version)
            message = f"version {args.version} gets all requests; the others stay loaded"
        else:
            name = object_names.adapter_configmap(service)
            configmap = await client.get(resources.CONFIG_MAP, namespace, name)
            entries = json.loads(configmap["data"][constants.CATALOG_FILE])["adapters"]
            patch += _rollback(path, adapter, entries)
            message = "the previous content is live when all pods have verified it"
        await client.patch(resources.LLM_SERVICE, namespace, service, patch)
    return f"adapter {args.name} of service {service}: {message}"


def _rollback(path: str, adapter: Body, entries: Sequence[Body]) -> list[dict[str, Any]]:
    """Return the operations that give an adapter the content that it had before."""
    previous = next((entry.get("previous") for entry in entries if entry["name"] == adapter["name"]), None)
    if previous is None:
        raise NotFound(f"adapter {adapter['name']!r}: has no previous content; set its source in the LLMService")
    operations = []
    for field in ("source", "canary"):
        if (value := previous.get(field)) is not None:
            operations.append({"op": "add", "path": f"{path}/{field}", "value": value})
        elif field in adapter:
            operations.append({"op": "remove", "path": f"{path}/{field}"})
    return operations


def _promote(path: str, adapter: Body, version: str) -> list[dict[str, Any]]:
    """Return the operations that give a version all requests of an adapter."""
    names = [entry["name"] for entry in adapter.get("versions") or ()]
    if version not in names:
        raise NotFound(
            f"adapter {adapter['name']!r}: has no version {version!r}, but {', '.join(names) or 'none'}; add it to "
            "spec.adapters[].versions"
        )
    return [
        {"op": "add", "path": f"{path}/versions/{index}/weight", "value": int(name == version)}
        for index, name in enumerate(names)
    ]


async def _find_adapter(client: ApiClient, namespace: str, service: str | None, name: str) -> tuple[Body, int]:
    """Return the service that has an adapter, and the adapter's index in the spec."""
    bodies = (await client.list(resources.LLM_SERVICE, namespace)).items
    found = [
        (body, index)
        for body in bodies
        if service in (None, body["metadata"]["name"])
        for index, adapter in enumerate(body["spec"].get("adapters") or ())
        if adapter["name"] == name
    ]
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted(body["metadata"]["name"] for body, _ in found))
    scope = f"namespace {namespace!r}" if service is None else f"service {service!r} of namespace {namespace!r}"
    if found:
        raise NotFound(f"adapter {name!r}: the services {names} have it; choose one with --service")
    raise NotFound(f"adapter {name!r}: does not exist in {scope}; use -n, --service or another name")
