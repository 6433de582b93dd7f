# SPDX-License-Identifier: Apache-2.0
"""`quire render`: plans an LLMService, renders its Kubernetes objects and prints them. Called by main.py."""

import argparse
import json
import secrets
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from quire_operator.api import crd
from quire_operator.api.llmservice import LLMService
from quire_operator.api.spec_defaults import SpecDefaults
from quire_operator.api.validation_errors import InvalidService
from quire_operator.cli.local_sources import LocalSources
from quire_operator.cli.plan import plan_from_args
from quire_operator.plan.planner import DEFAULT_IMAGES
from quire_operator.render.configmaps import secret_refs
from quire_operator.render.context import RenderContext
from quire_operator.render.engine_config import UnsupportedByEngine
from quire_operator.render.objects import render_objects


def run(args: argparse.Namespace) -> int:
    """Print the objects and return the exit status."""
    manifest = crd.single_service(args.file)
    defaults = SpecDefaults.read(args.defaults)
    service = defaults.service(crd.require_valid(manifest))
    images = dict.fromkeys(DEFAULT_IMAGES, args.image) if args.image else DEFAULT_IMAGES
    _, plan = plan_from_args(args, manifest, service, images)
    local_sources = LocalSources(manifest.folder, {}, args.secrets_dir)
    cluster = RenderContext(
        admin_key=secrets.token_urlsafe(32),
        available_kinds=frozenset(args.kinds),
        credentials=read_credentials(service, local_sources) if args.secrets_dir else {},
    )
    try:
        rendered = render_objects(service, plan, cluster)
    except UnsupportedByEngine as error:
        raise InvalidService([error.problem], manifest.location) from error
    print(
        json.dumps(list(rendered.manifests), indent=2) if args.output == "json" else dump_yaml(rendered.manifests),
        end="",
    )
    for kind in rendered.unavailable_kinds:
        print(f"quire: {kind} omitted; if the cluster has that kind, add --with {kind}", file=sys.stderr)
    if not args.secrets_dir and (missing := sorted({ref.name for ref in secret_refs(service)})):
        print(
            f"quire: values of Secrets {', '.join(missing)} omitted; give --secrets-dir to include them",
            file=sys.stderr,
        )
    return 0


def read_credentials(service: LLMService, local_sources: LocalSources) -> dict[str, dict[str, str]]:
    """Return the values of the Secrets to which the service's sources refer. Keys that are not used are omitted."""
    secret_values: dict[str, dict[str, str]] = {}
    for ref in secret_refs(service):
        values = local_sources.read_secret(ref)
        secret_values.setdefault(ref.name, {}).update({k: v for k, v in values.items() if ref.key in (None, k)})
    return secret_values


def dump_yaml(manifests: Iterable[Mapping[str, Any]]) -> str:
    """Return the objects as YAML documents. Strings with several lines become block scalars."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=120, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that does not write anchors, because anchors are unusual in manifests."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_str(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _represent_str)
