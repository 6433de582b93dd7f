# SPDX-License-Identifier: Apache-2.0
"""Runs Helm's commands for tests and development. It uses the `helm` on PATH if this is version 3.13 or later.
Otherwise, it uses a Python package that contains Helm's code.

    python hack/helm.py lint CHART [--strict] [-f VALUES]
    python hack/helm.py template NAME CHART [-n NAMESPACE] [-f VALUES]
    python hack/helm.py package CHART [-d FOLDER]
    python hack/helm.py install|upgrade NAME CHART --kubeconfig FILE [-n NAMESPACE] [-f VALUES] [--wait]
    python hack/helm.py rollback|uninstall NAME --kubeconfig FILE [-n NAMESPACE] [--wait]

The options have the names and meanings of Helm's options; `--help` lists the supported ones. The package is
helm-python-sdk, in which a third party provides Helm 4 as a library. It is used only for tests, and its version is
pinned.
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
    """Replace this process by `helm`, or run the command with the Python package."""
    if (binary := shutil.which("helm")) and _is_supported(binary):
        os.execv(binary, ["helm", *arguments])
    options = _parser().parse_args(arguments)
    from helm_python.errors import HelmError

    try:
        options.run(options)
    except HelmError as error:
        sys.exit(f"Error: {error}")


def _is_supported(binary: str) -> bool:
    """Return whether `binary` is Helm 3.13 or later, which has --dry-run=client."""
    command = [binary, "version", "--template", "{{.Version}}"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    match = re.match(r"v(\d+)\.(\d+)", output)
    return match is not None and (int(match[1]), int(match[2])) >= (3, 13)


def _lint(options: argparse.Namespace) -> None:
    from helm_python import chart

    report = chart.lint(options.chart, _values(options), strict=options.strict)
    for message in report["messages"]:
        print(f"[{('UNKNOWN', 'INFO', 'WARNING', 'ERROR')[message['severity']]}] {message['path']}: {message['error']}")
    if any(message["severity"] >= (2 if options.strict else 3) for message in report["messages"]) or report["errors"]:
        sys.exit(f"Error: {'; '.join(report['errors']) or 'the chart has flaws'}")


def _template(options: argparse.Namespace) -> None:
    from helm_python.chart import Chart

    with Chart.load(options.chart) as chart:
        chart.validate_schema(_values(options))
        rendered = chart.render(_values(options), name=options.name, namespace=options.namespace)
    for path, text in rendered.items():
        if text.strip() and not path.endswith("NOTES.txt"):
            print(f"---\n# Source: {path}\n{text}")


def _package(options: argparse.Namespace) -> None:
    from helm_python import chart

    print(
        f"Successfully packaged chart and saved it to: {chart.package(options.chart, destination=options.destination)}"
    )


def _install(options: argparse.Namespace) -> None:
    from helm_python.config import Config

    with Config(kubeconfig_path=options.kubeconfig, namespace=options.namespace) as config:
        action = config.install if options.command == "install" else config.upgrade
        extra_options = {"create_namespace": options.create_namespace} if options.command == "install" else {}
        release = action(
            options.chart,
            options.name,
            _values(options),
            namespace=options.namespace,
            timeout=options.timeout,
            wait="watcher" if options.wait else None,
            dry_run=options.dry_run,
            **extra_options,
        )
    print(f"NAME: {options.name}\nNAMESPACE: {options.namespace}\nNOTES:\n{release.get('notes', '')}")


def _rollback(options: argparse.Namespace) -> None:
    from helm_python.config import Config

    with Config(kubeconfig_path=options.kubeconfig, namespace=options.namespace) as config:
        config.rollback(options.name, timeout=options.timeout, wait="watcher" if options.wait else None)
    print("Rollback was a success! Happy Helming!")


def _uninstall(options: argparse.Namespace) -> None:
    from helm_python.config import Config

    with Config(kubeconfig_path=options.kubeconfig, namespace=options.namespace) as config:
        result = config.uninstall(options.name, timeout=options.timeout, wait="watcher" if options.wait else None)
    print(result.get("info") or f'release "{options.name}" uninstalled')


def _values(options: argparse.Namespace) -> dict[str, Any]:
    """Merge values files; later files override earlier ones."""
    values: dict[str, Any] = {}
    for file in options.values:
        values = _merge_values(values, yaml.safe_load(Path(file).read_text()) or {})
    return values


def _merge_values(base: Any, override: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(override, dict):
        return override
    return {**base, **{key: _merge_values(base.get(key), value) for key, value in override.items()}}


def _seconds(text: str) -> int:
    """Parse a duration. Tests use only seconds and minutes, for example 90s and 5m."""
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="helm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, positionals in (
        ("lint", _lint, ["chart"]),
        ("template", _template, ["name", "chart"]),
        ("package", _package, ["chart"]),
        ("install", _install, ["name", "chart"]),
        ("upgrade", _install, ["name", "chart"]),
        ("rollback", _rollback, ["name"]),
        ("uninstall", _uninstall, ["name"]),
    ):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        for positional in positionals:
            command.add_argument(positional)
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
