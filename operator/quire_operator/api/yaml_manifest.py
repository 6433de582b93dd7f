# SPDX-License-Identifier: Apache-2.0
"""Reads YAML manifests, and remembers the line number of each field.

The reader rejects duplicate keys, and it reads dates and keys as strings. kubectl does this too, but PyYAML does not.
Independent of LLMService. Called by the commands and crd.py.
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
"""Maximum number of values in a document. The largest LLMService contains a tenth of this number. Without this limit, a
small file could use YAML aliases to expand to any size.
"""

MAX_DEPTH = 100
"""Maximum nesting of objects and lists. A pod template has a third of this depth. The limit is needed because
validation is recursive.
"""


_FIXES: dict[str | None, str] = {
    "found character that cannot start any token": "indent with spaces, not tabs; quote text that begins with @ ` or %",
    "mapping values are not allowed in this context": "correct the indentation, and quote text that contains ': '",
    "could not find expected ':'": "write key: value, with a space after the colon",
    "found unexpected end of stream": "close the quotes that begin here",
    "did not find expected node content": "close or quote each [ and {; render Helm templates first",
    "found undefined alias": "quote text that begins with *",
    # In PyYAML 6.0.4, the parser has its own limit for nested brackets. It reports this error before _check_depth can.
    "exceeded maximum nesting depth": "nest at most 100 objects and lists",
}
"""How to fix the most common errors. The keys are the messages of the YAML parser."""


class ManifestError(ConfigError):
    """A file cannot be read, or is not YAML. If the position is known, the message begins with file:line:column."""


_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"


class _Loader(yaml.CSafeLoader):
    """PyYAML's safe loader, changed so that it reads dates (2026-01-01) and the value type (=) as strings."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (f"{_TAG}timestamp", f"{_TAG}value")]
    for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """One YAML document of a file."""

    file: str
    """File name that the user gave; `-` for standard input."""
    body: Any
    """The content of the document, which consists of JSON types."""
    lines: dict[FieldPath, int] = field(default_factory=dict)
    """The line number of each key and of each list entry, by its path. Line numbers start at 1. The empty path has the
    number of the document's first line.
    """

    @property
    def folder(self) -> Path:
        """Folder to which relative paths in the document refer."""
        return Path.cwd() if self.file == "-" else Path(self.file).resolve().parent

    def location(self, path: FieldPath) -> str:
        """Return file:line of the field. If the file does not contain the field, return the line of its nearest
        parent.
        """
        while path not in self.lines and path:
            path = path[:-1]
        return f"{self.file}:{self.lines.get(path, 1)}"


def read_manifests(file: str) -> list[Manifest]:
    """Return the non-empty documents of a file.

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
        raise ManifestError(f"{file}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error


def parse_manifests(text: str, file: str) -> Iterator[Manifest]:
    """Yield the non-empty documents of a YAML text.

    Raises:
        ManifestError: the text is not YAML, or is nested too deeply or too large.
    """
    loader = _Loader(text)
    try:
        _check_depth(text, file)
        while loader.check_node():
            node = loader.get_node()
            assert node is not None, "check_node returned True"
            lines: dict[FieldPath, int] = {(): node.start_mark.line + 1}
            body = _NodeBuilder(loader, lines, file).build(node, ())
            if body is not None:
                yield Manifest(file, body, lines)
    except yaml.MarkedYAMLError as error:
        # If a token is not closed, the scanner reports the end of the text. The mistake is at the beginning of the
        # token.
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
    """Reject documents that are nested too deeply.

    This check only reads the events of the parser. The loader is recursive C code: if it loaded a document that is too
    deep, the stack would overflow and the process would crash.
    """
    loader = _Loader(text)
    depth = 0
    try:
        while loader.check_event():
            event = loader.get_event()
            if isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            elif isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH + 1:  # The outermost collection has depth 0.
                    assert event.start_mark is not None, "events of a parser have a mark"
                    raise _manifest_error(file, event.start_mark, _TOO_DEEP)
    finally:
        loader.dispose()


_TOO_DEEP = f"more than {MAX_DEPTH} nested objects and lists"


def _manifest_error(file: str, mark: Any, reason: str) -> ManifestError:
    return ManifestError(f"{file}:{mark.line + 1}:{mark.column + 1}: {reason}")


class _NodeBuilder:
    """Converts the nodes of one document to values, and records the line of each."""

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
            # The constructors raise these errors for values such as 0x_, !!int abc, or a number with thousands of
            # digits.
            raise self._error(
                node, f"{format_value(node.value)} is not a valid {kind}; put it in quotes to make it a string"
            ) from error
        if not isinstance(value, str | bool | int | float | None) or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            problem = f"{format_value(node.value)} is a {kind}, and JSON has no such type"
            raise self._error(node, f"{problem}; put it in quotes to make it a string")
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
        """Return the key node and the value node of each field, by the field's name.

        The result includes the fields of objects that are merged into this one (<<).

        PyYAML's own merge is not used, because it copies merged fields again and again. A few lines of nested merges
        could then use up the memory.
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
                raise self._error(
                    key, "a key is not a string; quote the key, or if it contains {{ }}, render the template first"
                )
            if key.value in own_fields:
                line = own_fields[key.value][0].start_mark.line + 1
                raise self._error(key, f"key {key.value!r} already exists in line {line}; remove one of the two")
            own_fields[key.value] = (key, value_node)
        for key, value_node in [pair for pair in own_fields.values() if pair[0].tag == _MERGE]:
            del own_fields[key.value]
            # If several sources have a key, the first one takes precedence.
            for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                if not isinstance(source, yaml.MappingNode):
                    raise self._error(
                        source,
                        "<< must be followed by an object or a list of objects; if << is the name of a key, quote it",
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
        return self._error(node, f"more than {MAX_VALUES} values, or a recursive alias")

    def _error(self, node: yaml.Node, reason: str) -> ManifestError:
        return _manifest_error(self.file, node.start_mark, reason)
