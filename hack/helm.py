# SPDX-License-Identifier: Apache-2.0
"""Helm's commands for tests and development: the `helm` on PATH (3.13 or later), or else Helm's own code from PyPI.

    python hack/helm.py lint CHART [--strict] [-f VALUES]
    python hack/helm.py template NAME CHART [-n NAMESPACE] [-f VALUES]
    python hack/helm.py package CHART [-d FOLDER]
    python hack/helm.py install|upgrade NAME CHART --kubeconfig FILE [-n NAMESPACE] [-f VALUES] [--wait]
    python hack/helm.py uninstall NAME --kubeconfig FILE [-n NAMESPACE] [--wait]

Options are those of Helm with their meanings, as far as they are listed here; `--help` lists them. The package
(helm-python-sdk, a third party's build of Helm 4 as a library) is for tests only and pinned to one version.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def main(arguments: Sequence[str]) -> None:
    """Become `helm`, or do what it would."""
    if (binary := shutil.which("helm")) and _recent(binary):
        os.execv(binary, ["helm", *arguments])
    given = _parser().parse_args(arguments)
    from helm_python.errors import HelmError

    try:
        given.run(given)
    except HelmError as error:
        sys.exit(f"Error: {error}")


def _recent(binary: str) -> bool:
    """Whether it is Helm 3.13 or later, the first with --dry-run=client."""
    asked = [binary, "version", "--template", "{{.Version}}"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    found = re.match(r"v(\d+)\.(\d+)", said)
    return found is not None and (int(found[1]), int(found[2])) >= (3, 13)


def _lint(given: argparse.Namespace) -> None:
    from helm_python import chart

    report = chart.lint(given.chart, _values(given), strict=given.strict)
    for message in report["messages"]:
        print(f"[{('UNKNOWN', 'INFO', 'WARNING', 'ERROR')[message['severity']]}] {message['path']}: {message['error']}")
    if any(message["severity"] >= (2 if given.strict else 3) for message in report["messages"]) or report["errors"]:
        sys.exit(f"Error: {'; '.join(report['errors']) or 'the chart has flaws'}")


def _template(given: argparse.Namespace) -> None:
    from helm_python.chart import Chart

    with Chart.load(given.chart) as chart:
        chart.validate_schema(_values(given))
        rendered = chart.render(_values(given), name=given.name, namespace=given.namespace)
    for path, text in rendered.items():
        if text.strip() and not path.endswith("NOTES.txt"):
            print(f"---\n# Source: {path}\n{text}")


def _package(given: argparse.Namespace) -> None:
    from helm_python import chart

    print(f"Successfully packaged chart and saved it to: {chart.package(given.chart, destination=given.destination)}")


def _install(given: argparse.Namespace) -> None:
    from helm_python.config import Config

    with Config(kubeconfig_path=given.kubeconfig, namespace=given.namespace) as config:
        act = config.install if given.command == "install" else config.upgrade
        more = {"create_namespace": given.create_namespace} if given.command == "install" else {}
        release = act(
            given.chart,
            given.name,
            _values(given),
            namespace=given.namespace,
            timeout=given.timeout,
            wait="watcher" if given.wait else None,
            dry_run=given.dry_run,
            **more,
        )
    print(f"NAME: {given.name}\nNAMESPACE: {given.namespace}\nNOTES:\n{release.get('notes', '')}")


def _uninstall(given: argparse.Namespace) -> None:
    from helm_python.config import Config

    with Config(kubeconfig_path=given.kubeconfig, namespace=given.namespace) as config:
        done = config.uninstall(given.name, timeout=given.timeout, wait="watcher" if given.wait else None)
    print(done.get("info") or f'release "{given.name}" uninstalled')


def _values(given: argparse.Namespace) -> dict[str, Any]:
    """All files of values in one, later ones over earlier ones."""
    found: dict[str, Any] = {}
    for file in given.values:
        found = _over(found, yaml.safe_load(Path(file).read_text()) or {})
    return found


def _over(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {**below, **{key: _over(below.get(key), value) for key, value in above.items()}}


def _seconds(text: str) -> int:
    """Helm's durations, as far as tests need them: 90s, 5m."""
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="helm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, places in (
        ("lint", _lint, ["chart"]),
        ("template", _template, ["name", "chart"]),
        ("package", _package, ["chart"]),
        ("install", _install, ["name", "chart"]),
        ("upgrade", _install, ["name", "chart"]),
        ("uninstall", _uninstall, ["name"]),
    ):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        for place in places:
            command.add_argument(place)
        command.add_argument("-f", "--values", action="append", default=[])
        command.add_argument("-n", "--namespace", default="default")
        command.add_argument("-d", "--destination", default=".")
        command.add_argument("--strict", action="store_true")
        command.add_argument("--kubeconfig")
        command.add_argument("--create-namespace", action="store_true")
        command.add_argument("--wait", action="store_true")
        command.add_argument("--timeout", type=_seconds, default="5m")
        command.add_argument("--dry-run", choices=("client", "server"))
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
