# SPDX-License-Identifier: Apache-2.0
"""Manifest: a YAML document with the line of each of its fields.

Reads YAML as kubectl does where PyYAML differs by itself: a key given twice is an error, dates stay text, keys are
text. Knows nothing of LLMService; the commands call it.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from quire_operator.api.validation_errors import FieldPath, format_value
from quire_spec.errors import ConfigError

_NodesByKey = dict[str, tuple[yaml.Node, yaml.Node]]

MAX_VALUES = 100_000
"""Values in a document: ten times the largest LLMService. YAML's aliases can blow a small file up without bound."""

MAX_DEPTH = 100
"""Objects and lists inside of each other: three times what a pod template has. Whoever checks them recurses."""


_FIXES: dict[str | None, str] = {
    "found character that cannot start any token": "indent by spaces, no tabs; quote text that begins with @ ` or %",
    "mapping values are not allowed in this context": "indent it like its neighbours, and quote text that holds ': '",
    "could not find expected ':'": "write it as key: value, with the space",
    "found unexpected end of stream": "end the quotes that begin here",
    "did not find expected node content": "close each [ and {, or quote them; render a template of Helm first",
    "found undefined alias": "quote text that begins with *",
}
"""What to do about what YAML's parser finds most often, by its words."""


class ManifestError(ConfigError):
    """A file cannot be read, or is not YAML; the message begins with file, line and column where they are known."""


_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"


class _Loader(yaml.CSafeLoader):
    """The safe loader, less the guesses that text like 2026-01-01 is a date and that = is more than text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (f"{_TAG}timestamp", f"{_TAG}value")]
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

    def location(self, path: FieldPath) -> str:
        """file:line of the field, or of the nearest thing around it that is in the file."""
        while path not in self.lines and path:
            path = path[:-1]
        return f"{self.file}:{self.lines.get(path, 1)}"


def read_manifests(file: str) -> list[Manifest]:
    """The documents of a file, without empty ones.

    Raises:
        ManifestError: the file cannot be read, is not UTF-8, or is not YAML.
    """
    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return list(parse_manifests(text.decode(), file))
    except OSError as error:
        raise ManifestError(
            f"{file}: {error.strerror}; give the path of a YAML file, or - for standard input"
        ) from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"{file}: not UTF-8 at byte {error.start}; save it as UTF-8") from error


def parse_manifests(text: str, file: str) -> Iterator[Manifest]:
    """The documents of a YAML text; raises ManifestError as `read` does."""
    loader = _Loader(text)
    try:
        _check_depth(text, file)
        while loader.check_node():
            node = loader.get_node()
            assert node is not None, "check_node said that there is one"
            lines: dict[FieldPath, int] = {(): node.start_mark.line + 1}
            body = _NodeBuilder(loader, lines, file).build(node, ())
            if body is not None:
                yield Manifest(file, body, lines)
    except yaml.MarkedYAMLError as error:
        # What a scanner looks for in vain it misses where the text ends; what is wrong is where it began to look.
        is_scanner_error = (error.context or "").startswith("while scanning a ")
        mark = error.context_mark if is_scanner_error else error.problem_mark or error.context_mark
        location = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        fix = f"; {_FIXES[error.problem]}" if error.problem in _FIXES else ""
        raise ManifestError(f"{location}: not YAML: {error.problem}{fix}") from error
    except yaml.YAMLError as error:
        raise ManifestError(f"{file}: not YAML: {error}") from error
    finally:
        loader.dispose()


def _check_depth(text: str, file: str) -> None:
    """Refuse what is too deep while it is only events: the loader makes nodes of it by recursion in C, and ends the
    process where its stack ends."""
    loader = _Loader(text)
    depth = 0
    try:
        while loader.check_event():
            event = loader.get_event()
            if isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            elif isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH + 1:  # the outermost has a depth of 0
                    assert event.start_mark is not None, "only tokens made by hand have none"
                    raise _manifest_error(file, event.start_mark, _TOO_DEEP)
    finally:
        loader.dispose()


_TOO_DEEP = f"more than {MAX_DEPTH} objects and lists inside of each other"


def _manifest_error(file: str, mark: Any, reason: str) -> ManifestError:
    return ManifestError(f"{file}:{mark.line + 1}:{mark.column + 1}: {reason}")


class _NodeBuilder:
    """Turns the nodes of one document into values, and notes their lines."""

    def __init__(self, loader: _Loader, lines: dict[FieldPath, int], file: str) -> None:
        self.loader, self.lines, self.file = loader, lines, file
        self.num_values = 0
        self.open_nodes: set[int] = set()
        self.merging_nodes: set[int] = set()
        self.resolved_fields: dict[int, _NodesByKey] = {}

    def build(self, node: yaml.Node, path: FieldPath) -> Any:
        self._count_values(node, 1)
        if id(node) in self.open_nodes:
            raise self._too_many_values(node)
        if len(path) > MAX_DEPTH:
            raise self._error(node, _TOO_DEEP)
        if isinstance(node, yaml.ScalarNode):
            return self._build_scalar(node)
        self.open_nodes.add(id(node))
        value = self._build_mapping(node, path) if isinstance(node, yaml.MappingNode) else self._build_list(node, path)
        self.open_nodes.discard(id(node))
        return value

    def _build_scalar(self, node: yaml.ScalarNode) -> Any:
        kind = node.tag.removeprefix(_TAG)
        try:
            value = self.loader.construct_object(node)
        except (ValueError, KeyError, AttributeError) as error:
            # Whatever the constructors make of 0x_, !!int abc, or a number of thousands of digits.
            raise self._error(
                node, f"{format_value(node.value)} is not a valid {kind}; put it in quotes to be text"
            ) from error
        if not isinstance(value, str | bool | int | float | None) or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            raise self._error(
                node, f"{format_value(node.value)} is a {kind}, which JSON cannot say; put it in quotes to be text"
            )
        return value

    def _build_mapping(self, node: yaml.MappingNode, path: FieldPath) -> dict[str, Any]:
        value = {}
        for name, (key, value_node) in self._resolve_fields(node).items():
            field_path = (*path, name)
            self.lines[field_path] = key.start_mark.line + 1
            value[name] = self.build(value_node, field_path)
        return value

    def _build_list(self, node: yaml.Node, path: FieldPath) -> list[Any]:
        value = []
        for i, value_node in enumerate(node.value):
            self.lines[(*path, i)] = value_node.start_mark.line + 1
            value.append(self.build(value_node, (*path, i)))
        return value

    def _resolve_fields(self, node: yaml.MappingNode) -> _NodesByKey:
        """Key and value by name, with what is merged into them.

        PyYAML's own way copies what is merged again and again, so that a few lines of merges within merges fill the
        memory.
        """
        if id(node) in self.resolved_fields:
            return self.resolved_fields[id(node)]
        if id(node) in self.merging_nodes:
            raise self._too_many_values(node)
        self.merging_nodes.add(id(node))
        own_fields: _NodesByKey = {}
        merged_fields: _NodesByKey = {}
        for key, value_node in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, "a key that is not text; quote it, or render the template that {{ }} is of")
            if key.value in own_fields:
                line = own_fields[key.value][0].start_mark.line + 1
                raise self._error(key, f"key {key.value!r} is given in line {line} already; keep one of them")
            own_fields[key.value] = (key, value_node)
        for key, value_node in [pair for pair in own_fields.values() if pair[0].tag == _MERGE]:
            del own_fields[key.value]
            # Of several sources, the first that has a key counts.
            for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                if not isinstance(source, yaml.MappingNode):
                    raise self._error(
                        source, "<< takes an object, or a list of them; quote it to have a key of that name"
                    )
                fields = self._resolve_fields(source)
                self._count_values(source, len(fields))
                merged_fields = fields | merged_fields
        self.merging_nodes.discard(id(node))
        self.resolved_fields[id(node)] = merged_fields | own_fields
        return self.resolved_fields[id(node)]

    def _count_values(self, node: yaml.Node, num: int) -> None:
        self.num_values += num
        if self.num_values > MAX_VALUES:
            raise self._too_many_values(node)

    def _too_many_values(self, node: yaml.Node) -> ManifestError:
        return self._error(node, f"more than {MAX_VALUES} values, or an alias inside of itself")

    def _error(self, node: yaml.Node, reason: str) -> ManifestError:
        return _manifest_error(self.file, node.start_mark, reason)
