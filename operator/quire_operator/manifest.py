# SPDX-License-Identifier: Apache-2.0
"""Manifest: a YAML document with the line of each of its fields.

Reads YAML as kubectl does where PyYAML differs by itself: a key given twice is an error, dates stay text, keys are
text. Knows nothing of LLMService; the commands call it.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from quire_operator.errors import FieldPath
from quire_spec.errors import ConfigError

MAX_VALUES = 100_000
"""Values in a document: ten times the largest LLMService. YAML's aliases can blow a small file up without bound."""

MAX_DEPTH = 100
"""Objects and lists inside of each other: three times what a pod template has. Whoever checks them recurses."""


class ManifestError(ConfigError):
    """A file cannot be read, or is not YAML; the message begins with file, line and column where they are known."""


class _Loader(yaml.CSafeLoader):
    """The safe loader, less the guess that text like 2026-01-01 is a date."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """One document of a file."""

    file: str
    """The file's name as it was given; `-` is the standard input."""
    body: Any
    """Parsed JSON types."""
    lines: dict[FieldPath, int] = field(default_factory=dict)
    """Line of each key and list entry, from 1; the empty path is the document's first."""

    @property
    def folder(self) -> Path:
        """Folder that relative paths in the document start from."""
        return Path.cwd() if self.file == "-" else Path(self.file).resolve().parent

    def place(self, path: FieldPath) -> str:
        """file:line of the field, or of the nearest thing around it that is in the file."""
        while path not in self.lines and path:
            path = path[:-1]
        return f"{self.file}:{self.lines.get(path, 1)}"


def read(file: str) -> list[Manifest]:
    """The documents of a file, without empty ones.

    Raises:
        ManifestError: the file cannot be read, is not UTF-8, or is not YAML.
    """
    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return list(parse(text.decode(), file))
    except OSError as error:
        raise ManifestError(
            f"{file}: {error.strerror}; give the path of a YAML file, or - for standard input"
        ) from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{file}: not UTF-8 at byte {error.start}; save it as UTF-8") from error


def parse(text: str, file: str) -> Iterator[Manifest]:
    """The documents of a YAML text; raises ManifestError as `read` does."""
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None, "check_node said that there is one"
            lines: dict[FieldPath, int] = {(): node.start_mark.line + 1}
            body = _Builder(loader, lines, file).build(node, ())
            if body is not None:
                yield Manifest(file, body, lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        raise ManifestError(f"{where}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ManifestError(f"{file}: not YAML: {error}") from error
    finally:
        loader.dispose()


class _Builder:
    """Turns the nodes of one document into values, and notes their lines."""

    def __init__(self, loader: _Loader, lines: dict[FieldPath, int], file: str) -> None:
        self.loader, self.lines, self.file = loader, lines, file
        self.num_values = 0
        self.open: set[int] = set()
        self.flat: set[int] = set()

    def build(self, node: yaml.Node, path: FieldPath) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES or id(node) in self.open:
            raise self._error(node, f"more than {MAX_VALUES} values, or an alias inside of itself")
        if len(path) > MAX_DEPTH:
            raise self._error(node, f"more than {MAX_DEPTH} objects and lists inside of each other")
        if isinstance(node, yaml.ScalarNode):
            return self.loader.construct_object(node)
        self.open.add(id(node))
        value = self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._list(node, path)
        self.open.discard(id(node))
        return value

    def _mapping(self, node: yaml.MappingNode, path: FieldPath) -> dict[str, Any]:
        self._flatten(node)
        value = {}
        for key, content in node.value:
            here = (*path, str(key.value))
            self.lines[here] = key.start_mark.line + 1
            value[str(key.value)] = self.build(content, here)
        return value

    def _list(self, node: yaml.Node, path: FieldPath) -> list[Any]:
        value = []
        for i, content in enumerate(node.value):
            self.lines[(*path, i)] = content.start_mark.line + 1
            value.append(self.build(content, (*path, i)))
        return value

    def _flatten(self, node: yaml.MappingNode) -> None:
        # Once a node, before its merge keys are resolved: an alias leads to the same node again, with them resolved.
        if id(node) in self.flat:
            return
        self.flat.add(id(node))
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, "a key that is not text")
            if key.value in seen:
                raise self._error(
                    key, f"key {key.value!r} is given in line {seen[key.value]} already; keep one of them"
                )
            seen[key.value] = key.start_mark.line + 1
        self.loader.flatten_mapping(node)

    def _error(self, node: yaml.Node, what: str) -> ManifestError:
        mark = node.start_mark
        return ManifestError(f"{self.file}:{mark.line + 1}:{mark.column + 1}: {what}")
