# SPDX-License-Identifier: Apache-2.0
"""`quire adapter`: changes an adapter of a service in a cluster. Called by cli/main.py.

The command edits the LLMService, as `kubectl edit` would. The operator then does what it does for every edit.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping
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
    config = ClusterConfig.from_environment(args.kubeconfig, args.context)
    print(asyncio.run(_rollback(config, args.namespace or config.namespace, args.service, args.name)))
    return 0


async def _rollback(config: ClusterConfig, namespace: str, service: str | None, name: str) -> str:
    """Give an adapter the content that it had before; return a message.

    Raises:
        NotFound: no service, or several services, have the adapter, or it has no previous content.
        ApiError: the API server rejected a request or did not respond.
    """
    async with ApiClient(config) as client:
        body, index = await _find_adapter(client, namespace, service, name)
        service = str(body["metadata"]["name"])
        configmap = await client.get(resources.CONFIG_MAP, namespace, object_names.adapter_configmap(service))
        entries = json.loads(configmap["data"][constants.CATALOG_FILE])["adapters"]
        previous = next((entry.get("previous") for entry in entries if entry["name"] == name), None)
        if previous is None:
            raise NotFound(
                f"adapter {name!r} of service {service!r}: has no previous content; set its source in the LLMService"
            )
        path, spec = f"/spec/adapters/{index}", body["spec"]["adapters"][index]
        fields = [("source", previous["source"]), ("canary", previous.get("canary"))]
        patch = [
            # If the list was edited in the meantime, the API server rejects the patch.
            {"op": "test", "path": f"{path}/name", "value": name},
            *(
                {"op": "remove", "path": f"{path}/{field}"}
                if value is None
                else {"op": "add", "path": f"{path}/{field}", "value": value}
                for field, value in fields
                if value is not None or field in spec
            ),
        ]
        await client.patch(resources.LLM_SERVICE, namespace, service, patch)
    return f"adapter {name} of service {service}: the previous content is live when all pods have verified it"


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
