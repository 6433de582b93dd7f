# SPDX-License-Identifier: Apache-2.0
"""Messages for violations of the schema.

If a value violates a keyword of OpenAPI, this module creates a problem that contains a rule and a fix.

Called by openapi_schema.py for each violation. A test checks that every pattern in the CRD has a message here.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quire_operator.api.engine_spec import PEER_PATTERN
from quire_operator.api.networking_spec import HOSTNAME
from quire_operator.api.pod_spec import QUANTITY_OF_RESOURCE
from quire_operator.api.validation_errors import ABSENT, FieldPath, Problem, format_path, format_value
from quire_operator.api.workload_spec import METRIC_NAME, PERCENTAGE
from quire_spec.documents import server_arguments
from quire_spec.documents.field_schema import LABELS

Schema = Mapping[str, Any]

_TYPE_NAMES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "object": "an object",
    "array": "a list",
}
_BOUND_MESSAGES = {
    "minimum": ("must be at least {}", "raise it"),
    "maximum": ("must be at most {}", "lower it"),
    "minLength": ("must have at least {} characters", "complete it, or omit the field"),
    "maxLength": ("must have at most {} characters", "shorten it"),
    "maxItems": ("must have at most {} entries", "remove some"),
    "maxProperties": ("must have at most {} fields", "remove some"),
}


PathsByName = Mapping[str, Sequence[FieldPath]]
"""For each normalized name (see `normalize_name`), the paths of the fields that have this name."""

_VLLM_ALIASES = {
    "maxloadedloraranks": "maxloadedranks",
    "maxloras": "maxloaded",
    "maxlorarank": "maxrank",
    "loraexperts": "experts",
    "loramodulestosave": "modulestosave",
    "maxcpuloras": "maxcached",
    "cpuloramemorybytes": "maxcachedmemory",
    "enableprefixcaching": "prefixcaching",
}
"""Fields that correspond to engine arguments of vLLM. The key is the normalized name of the argument, and the value is
the normalized name of the field.
"""

_MAX_SUGGESTED_PATHS = 3
"""If a field name occurs at more paths than this, it is too common to be suggested."""
_MAX_UNKNOWN_FIELDS = 50
"""At most this many unknown fields of an object are reported one by one, and the others only by their number. Searching
for a suggestion takes 0.1 ms for each field.
"""

QUANTITY_RULE = "must be a number with a unit"
"""Rule for sizes. It requires a unit, because Kubernetes would read a number without a unit as bytes."""
_NAME_RULE = "must contain only a-z, 0-9, '-' and '.', and begin and end with a letter or digit"
_CIDR_RULE = "must be an IP range"

PATTERN_MESSAGES: dict[str, tuple[str, str]] = {
    r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$": (_NAME_RULE, "use a name such as tales-1.5"),
    r"^[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?$": (
        "must be the name of a host, without a scheme and a port",
        "use a name such as images.example",
    ),
    r"^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$": (
        "must contain only letters, digits, '-', '_' and '.', and begin and end with a letter or digit",
        "use a name such as Tales-1.5",
    ),
    r"^(https?|grpc)://[^/\s]+(/\S*)?$": (
        "must be a URL with http, https or grpc",
        "use a URL such as http://collector.monitoring:4317",
    ),
    r"^[A-Za-z0-9]([-A-Za-z0-9._/:@]*[A-Za-z0-9])?$": (
        "must contain only letters, digits and -._/:@, and begin and end with a letter or digit",
        "use a name such as organization/model",
    ),
    r"^[1-9][0-9]*(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$": (QUANTITY_RULE, "write it like 4Gi or 512Mi"),
    LABELS["items"]["pattern"]: (
        "must be a label value: letters, digits, '-', '_' and '.', beginning and ending with a letter or digit",
        "use a value such as team-a",
    ),
    HOSTNAME: ("must be a host name in lower case, which can begin with *.", "write it like llm.example"),
    r"^([0-9]{1,5}(h|m|s|ms)){1,4}$": ("must be a duration", "write it like 30s or 1h30m"),
    METRIC_NAME: ("must be the name of a metric", "write it like llm_d_epp_flow_control_queue_size"),
    PERCENTAGE: ("must be a number or a percentage", 'write it like 1 or "25%"'),
    QUANTITY_OF_RESOURCE: ("must be a quantity", 'write it like "500m" or "2Gi", with the quotes'),
    r"^[1-9][0-9]*(\.[0-9]+)?m?$": ("must be a number of cores", 'write it like "4" or "1500m", with the quotes'),
    r"^(0\.[0-9]{0,2}[1-9]|[1-9][0-9]{0,2}(\.[0-9]{1,3})?)$": (
        "must be a positive decimal below 1000",
        'write it like "1.5", with the quotes',
    ),
    r"^(0(\.[0-9]{1,3})?|1(\.0)?)$": ("must be a decimal from 0 to 1", 'write it like "0.1", with the quotes'),
    r"^0\.[1-9][0-9]{0,2}$": ("must be a decimal from 0.1 to 0.999", 'write it like "0.90", with the quotes'),
    r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$": (
        "must be the ID of a hub repository",
        "write it like organization/name, without the address of the hub",
    ),
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": ("must be a user or an organization of the hub", "omit the address of the hub"),
    r"^[A-Za-z0-9][A-Za-z0-9._/-]*$": ("must be a branch, tag or commit", "copy it from the page of the repository"),
    r"^[-A-Za-z0-9._*?\[\]!]+$": (
        "must be a name of an adapter, or a pattern with *, ? and [abc]",
        "write it like web-*",
    ),
    r"^-----BEGIN PUBLIC KEY-----": (
        "must be a public key in PEM format",
        "copy the file that openssl ec -pubout wrote",
    ),
    r"^[-._a-zA-Z0-9]+$": ("must be a key of a Secret", "use letters, digits, '-', '_' and '.'"),
    r"^s3://[a-z0-9][a-z0-9.-]*[a-z0-9](/.*)?$": (
        "must be s3://, a bucket (two or more of a-z, 0-9, '-' and '.') and a folder",
        "write it like s3://bucket/folder",
    ),
    r"^gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/.*)?$": (
        "must be gs://, a bucket (three or more of a-z, 0-9, '-', '_' and '.') and a folder",
        "write it like gs://bucket/folder",
    ),
    r"^az://[a-z0-9$][a-z0-9-]{1,61}[a-z0-9](/.*)?$": (
        "must be az://, a container (three or more of a-z, 0-9 and '-') and a folder",
        "write it like az://container/folder, and the account into the field account",
    ),
    r"^[a-zA-Z0-9][a-zA-Z0-9.-]*(:[0-9]{1,5})?/[a-z0-9]+([._/-]+[a-z0-9]+)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
    r"(@sha256:[0-9a-f]{64})?$": (
        "must be an artifact with its registry, in lower case",
        "write it like registry.example.com/loras/sql:1, and put oci:// before it only in a URL",
    ),
    r"^([^/.][^/]*(/[^/.][^/]*)*)?$": (
        "must be a folder in the image, without a leading / and without parts that begin with a dot",
        "write it like models/llama",
    ),
    r"^[a-z0-9]+$": ("must be the name of a storage account", "use lower-case letters and digits"),
    r"^https?://[^ ]+$": ("must be a URL", "begin it with https:// or http://"),
    r"^([*]|https?://[^ /]+)$": ("must be an origin or *", "write it like https://chat.example, without a path"),
    r"^[a-z0-9-]+$": ("must be the name of a region", "write it like eu-central-1"),
    r"^[0-9a-f]{64}$": ("must be 64 hexadecimal digits", "copy the first column of the output of sha256sum"),
    r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$": (
        "must be a label value: letters, digits, '-', '_' and '.'",
        "copy it from kubectl get nodes -L nvidia.com/gpu.product",
    ),
    r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$": (
        "must be the name of an extended resource, in the form domain/name",
        "write it like nvidia.com/gpu",
    ),
    r"^[A-Za-z0-9][-A-Za-z0-9._/:@]*$": ("must be an image reference", "write it like name:tag or name@sha256:..."),
    r"^[A-Za-z_][A-Za-z0-9_]*$": (
        "must be the name of a variable: letters, digits and '_', not beginning with a digit",
        "write it like NCCL_DEBUG",
    ),
    r"^/[^\s]*$": ("must be an absolute path", "begin it with /"),
    server_arguments.PATTERN: (
        "must be an allowed argument, in the form NAME=VALUE, with a valid value",
        f"use one of {', '.join(server_arguments.ALLOWED)}",
    ),
    PEER_PATTERN: ("must be HOST:PORT or NETWORK:PORT", "write it like 10.0.0.7:8005 or 10.0.0.0/8:8005"),
    r"^[0-9a-fA-F.:]+/[0-9]{1,3}$": (_CIDR_RULE, "write it like 10.0.0.0/8"),
}


def explain_error(
    keyword: str, limit: Any, value: Any, schema: Schema, path: FieldPath, paths_by_name: PathsByName
) -> Iterator[Problem]:
    """Yield the problems of `value`, which violates `keyword` of `schema`.

    `path` is the path of the value, and `limit` is the value of the keyword.
    """
    if keyword == "additionalProperties":
        yield from _unknown_fields(value, schema, path, paths_by_name)
    elif keyword in ("minLength", "minItems") and limit == 1:
        yield Problem(path, value, "must not be empty", "fill it in, or omit the field")
    elif keyword == "minLength" and not re.search(schema.get("pattern", ""), value):
        return  # The problem about the pattern is more precise.
    elif keyword in _BOUND_MESSAGES:
        rule, fix = _BOUND_MESSAGES[keyword]
        yield Problem(path, value, rule.format(limit), fix)
    else:
        yield from _EXPLAINERS[keyword](limit, value, schema, path)


def closest_match(name: str, candidates: Sequence[str]) -> str | None:
    """Return the candidate that is most similar to the name, or None if no candidate is similar enough."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def field_paths(schema: Schema, path: FieldPath) -> Iterator[FieldPath]:
    """Yield the path of every field in a schema. Fields of list entries are omitted.

    `path` is the path of the schema itself.
    """
    for name, field in schema.get("properties", {}).items():
        yield (*path, name)
        yield from field_paths(field, (*path, name))


def normalize_name(name: str) -> str:
    """Return the name in lower case and without underscores. For example, gpu_memory and gpuMemory become equal."""
    return name.replace("_", "").lower()


def _unknown_fields(value: Any, schema: Schema, path: FieldPath, paths_by_name: PathsByName) -> Iterator[Problem]:
    known_names = _writable_fields(schema)
    known_list = ", ".join(known_names)
    unknown = sorted(set(value) - set(schema["properties"]))
    for name in unknown[:_MAX_UNKNOWN_FIELDS]:
        closest, normalized = closest_match(name, known_names), normalize_name(str(name))
        normalized = _VLLM_ALIASES.get(normalized, normalized)
        # Prefer a field that is nested in the same object, for example within the same list entry.
        nested_paths = [
            field_path for field_path in field_paths(schema, path) if normalize_name(str(field_path[-1])) == normalized
        ]
        suggested_paths = nested_paths or paths_by_name.get(normalized, ())
        guess, suggestion = closest, (*path, closest) if closest else None
        if 0 < len(suggested_paths) <= _MAX_SUGGESTED_PATHS and suggestion not in suggested_paths:
            guess, suggestion = (
                " or ".join(map(format_path, suggested_paths)),
                suggested_paths[0] if len(suggested_paths) == 1 else None,
            )
        fix = f"did you mean {guess}? Known fields: {known_list}" if guess else f"known fields: {known_list}"
        yield Problem((*path, name), ABSENT, "unknown field", fix, suggestion)
    if len(unknown) > _MAX_UNKNOWN_FIELDS:
        yield Problem(path, ABSENT, f"has {len(unknown) - _MAX_UNKNOWN_FIELDS} more unknown fields", "remove them")


def _missing_fields(limit: Any, value: Any, schema: Schema, path: FieldPath) -> Iterator[Problem]:
    for name in limit:
        if name not in value:
            description = schema.get("properties", {}).get(name, {}).get("description", "").partition(". ")[0]
            yield Problem(
                (*path, name), ABSENT, "missing", f"add it ({description.rstrip('.')})" if description else "add it"
            )


def _wrong_type(limit: Any, value: Any, schema: Schema, path: FieldPath) -> Iterator[Problem]:
    if isinstance(limit, list):
        yield Problem(path, value, *PATTERN_MESSAGES[schema["pattern"]])
    else:
        yield Problem(path, value, f"must be {_TYPE_NAMES[limit]}", _type_fix(limit, value, schema))


def _type_fix(limit: str, value: Any, schema: Schema) -> str:
    """Return the fix for a value that does not have the required type."""
    if limit == "string" and isinstance(value, bool | int | float):
        pattern = schema.get("pattern")
        if pattern and (PATTERN_MESSAGES[pattern][0] == QUANTITY_RULE or not re.search(pattern, format_value(value))):
            return PATTERN_MESSAGES[pattern][1]
        return f'put it in quotes: "{format_value(value)}"'
    if limit in ("integer", "number", "boolean") and isinstance(value, str):
        return f"write {_TYPE_NAMES[limit]}, without quotes"
    if limit == "object" and (fields := _writable_fields(schema)):
        return f"give an object with the fields {', '.join(fields)}"
    if limit == "array":
        fields = schema["items"].get("required") or list(schema["items"].get("properties", {}))
        entry = f"{fields[0]}: ..." if fields else "..." if isinstance(value, Mapping) else format_value(value)
        return f"give a list, each entry like - {entry}"
    return f"give {_TYPE_NAMES[limit]}"


def _writable_fields(schema: Schema) -> list[str]:
    """Return the fields that a user can write. A field whose schema is empty is omitted, because only an API server
    writes it.
    """
    return sorted(name for name, field in schema.get("properties", {}).items() if field)


def _not_in_enum(limit: Any, value: Any, _: Schema, path: FieldPath) -> Iterator[Problem]:
    allowed = [str(choice) for choice in limit]
    suggestion = closest_match(value, allowed) if isinstance(value, str) else None
    if suggestion:
        fix = f"did you mean {suggestion}?"
    else:
        fix = "use one of these" if len(allowed) > 1 else f"write {allowed[0]}"
    yield Problem(path, value, f"must be {'one of ' if len(allowed) > 1 else ''}{', '.join(allowed)}", fix)


def _pattern_mismatch(limit: Any, value: Any, schema: Schema, path: FieldPath) -> Iterator[Problem]:
    if value or schema.get("minLength") != 1:  # For an empty value, minLength reports the problem.
        yield Problem(path, value, *PATTERN_MESSAGES[limit])


_EXPLAINERS: dict[str, Callable[[Any, Any, Schema, FieldPath], Iterator[Problem]]] = {
    "required": _missing_fields,
    "type": _wrong_type,
    "enum": _not_in_enum,
    "pattern": _pattern_mismatch,
}
