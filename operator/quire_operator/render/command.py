# SPDX-License-Identifier: Apache-2.0
"""`quire render`: plans, has desired.py make the objects, and prints them. Called by cli.py."""

import argparse
import json
import secrets
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from quire_operator import crd
from quire_operator.engine_config import EngineRefuses
from quire_operator.errors import InvalidService
from quire_operator.plan.command import planned
from quire_operator.plan.planner import DEFAULT_IMAGES
from quire_operator.render.cluster import Cluster
from quire_operator.render.config import secret_refs
from quire_operator.render.desired import desired
from quire_operator.service import LLMService
from quire_operator.sources import Machine


def run(options: argparse.Namespace) -> int:
    """Print the objects."""
    manifest = crd.only_service(options.file)
    service = LLMService.from_body(crd.valid(manifest))
    images = dict.fromkeys(DEFAULT_IMAGES, options.image) if options.image else DEFAULT_IMAGES
    _, plan = planned(options, manifest, service, images)
    machine = Machine(manifest.folder, {}, options.secrets_dir)
    cluster = Cluster(
        admin_key=secrets.token_urlsafe(32),
        offers=frozenset(options.kinds),
        credentials=credentials(service, machine) if options.secrets_dir else {},
    )
    try:
        found = desired(service, plan, cluster)
    except EngineRefuses as error:
        raise InvalidService([error.problem], manifest.place) from error
    print(json.dumps(list(found.manifests), indent=2) if options.output == "json" else dumped(found.manifests), end="")
    for kind in found.left_out:
        print(f"quire: {kind} left out; where the cluster has that kind, add --with {kind}", file=sys.stderr)
    if not options.secrets_dir and (missing := sorted({ref.name for ref in secret_refs(service)})):
        print(f"quire: values of {', '.join(missing)} left out; give --secrets-dir to have them", file=sys.stderr)
    return 0


def credentials(service: LLMService, machine: Machine) -> dict[str, dict[str, str]]:
    """The values of the Secrets that the service's sources name, no more keys than they use."""
    found: dict[str, dict[str, str]] = {}
    for ref in secret_refs(service):
        values = machine.secret(ref)
        found.setdefault(ref.name, {}).update({k: v for k, v in values.items() if ref.key in (None, k)})
    return found


def dumped(manifests: Iterable[Mapping[str, Any]]) -> str:
    """The objects as YAML documents, texts of several lines as blocks."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=120, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Without anchors, which people do not expect in manifests."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
