# SPDX-License-Identifier: Apache-2.0
"""Structural faults in words: what a failed OpenAPI keyword means for the reader of a file, and how to put it right.

Called by schema.py for each fault; knows nothing of how it was found.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quire_operator import patterns
from quire_operator.errors import ABSENT, FieldPath, Problem, dotted, shown

Schema = Mapping[str, Any]

_KINDS = {
    "string": "a string",
    "integer": "a whole number",
    "boolean": "true or false",
    "object": "an object",
    "array": "a list",
}
_BOUNDS = {
    "minimum": ("must be at least {}", "raise it"),
    "maximum": ("must be at most {}", "lower it"),
    "minLength": ("must have at least {} characters", "complete it, or omit the field"),
    "maxLength": ("must have at most {} characters", "shorten it"),
    "maxItems": ("must have at most {} entries", "remove some"),
    "maxProperties": ("must have at most {} fields", "remove some"),
}


Places = Mapping[str, Sequence[FieldPath]]
"""Where in the document there is a field of a name, by `folded` names."""

_VLLM = {
    "maxloras": "maxloaded",
    "maxlorarank": "maxrank",
    "maxcpuloras": "maxcached",
    "cpuloramemorybytes": "maxcachedmemory",
}
"""Engine arguments of vLLM, `folded`, whose fields have names that are not near theirs."""

_MAX_PLACES = 3
"""A field that is in more places than that, such as name, was hardly meant as one of them."""
_MAX_UNKNOWN = 50
"""Of an object's unknown fields, those that are told one by one: finding what was meant takes 0.1 ms for each."""


def explain(keyword: str, limit: Any, value: Any, schema: Schema, path: FieldPath, places: Places) -> Iterator[Problem]:
    """The problems behind one failed keyword of `schema`, whose argument is `limit`, at `path` with `value`."""
    if keyword == "additionalProperties":
        yield from _unknown(value, schema, path, places)
    elif keyword in ("minLength", "minItems") and limit == 1:
        yield Problem(path, value, "must not be empty", "fill it in, or omit the field")
    elif keyword == "minLength" and not re.search(schema.get("pattern", ""), value):
        return  # the pattern says more
    elif keyword in _BOUNDS:
        rule, fix = _BOUNDS[keyword]
        yield Problem(path, value, rule.format(limit), fix)
    else:
        yield from _EXPLAIN[keyword](limit, value, schema, path)


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that was probably meant, or None."""
    by_lower = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def places_in(schema: Schema, path: FieldPath) -> Iterator[FieldPath]:
    """Every field of `schema`, which stands at `path`, but for those of lists' entries."""
    for name, field in schema.get("properties", {}).items():
        yield (*path, name)
        yield from places_in(field, (*path, name))


def folded(name: str) -> str:
    """The name without what is often written otherwise: gpu_memory as gpuMemory."""
    return name.replace("_", "").lower()


def _unknown(value: Any, schema: Schema, path: FieldPath, places: Places) -> Iterator[Problem]:
    known = _known(schema)
    all_known = ", ".join(known)
    unknown = sorted(set(value) - set(schema["properties"]))
    for name in unknown[:_MAX_UNKNOWN]:
        near, word = nearest(name, known), folded(str(name))
        word = _VLLM.get(word, word)
        # Deeper in the same object, if it is there: an entry of a list has such fields of its own.
        own = [place for place in places_in(schema, path) if folded(str(place[-1])) == word]
        there = own or places.get(word, ())
        guess, meant = near, (*path, near) if near else None
        if 0 < len(there) <= _MAX_PLACES and meant not in there:
            guess, meant = " or ".join(map(dotted, there)), there[0] if len(there) == 1 else None
        fix = f"did you mean {guess}? There are {all_known}" if guess else f"there are {all_known}"
        yield Problem((*path, name), ABSENT, "unknown field", fix, meant)
    if len(unknown) > _MAX_UNKNOWN:
        yield Problem(path, ABSENT, f"has {len(unknown) - _MAX_UNKNOWN} more unknown fields", "remove them")


def _missing(limit: Any, value: Any, schema: Schema, path: FieldPath) -> Iterator[Problem]:
    for name in limit:
        if name not in value:
            what = schema.get("properties", {}).get(name, {}).get("description", "").partition(". ")[0]
            yield Problem((*path, name), ABSENT, "missing", f"add it ({what.rstrip('.')})" if what else "add it")


def _type(limit: Any, value: Any, schema: Schema, path: FieldPath) -> Iterator[Problem]:
    yield Problem(path, value, f"must be {_KINDS[limit]}", _typed(limit, value, schema))


def _typed(limit: str, value: Any, schema: Schema) -> str:
    """How to give a value the type that it must have."""
    if limit == "string" and isinstance(value, bool | int | float):
        pattern = schema.get("pattern")
        if pattern and (patterns.WORDS[pattern][0] == patterns.WITH_UNIT or not re.search(pattern, shown(value))):
            return patterns.WORDS[pattern][1]
        return f'put it in quotes: "{shown(value)}"'
    if limit in ("integer", "boolean") and isinstance(value, str):
        return f"write {_KINDS[limit]}, without quotes"
    if limit == "object" and (fields := _known(schema)):
        return f"give an object; there are {', '.join(fields)}"
    if limit == "array":
        fields = schema["items"].get("required") or list(schema["items"].get("properties", {}))
        entry = f"{fields[0]}: ..." if fields else "..." if isinstance(value, Mapping) else shown(value)
        return f"give a list, each entry like - {entry}"
    return f"give {_KINDS[limit]}"


def _known(schema: Schema) -> list[str]:
    """Fields that a user may write: one with an empty schema is one that only an API server writes."""
    return sorted(name for name, field in schema.get("properties", {}).items() if field)


def _enum(limit: Any, value: Any, _: Schema, path: FieldPath) -> Iterator[Problem]:
    allowed = [str(choice) for choice in limit]
    meant = nearest(value, allowed) if isinstance(value, str) else None
    if meant:
        fix = f"did you mean {meant}?"
    else:
        fix = "take one of these" if len(allowed) > 1 else f"write {allowed[0]}"
    yield Problem(path, value, f"must be {'one of ' if len(allowed) > 1 else ''}{', '.join(allowed)}", fix)


def _pattern(limit: Any, value: Any, schema: Schema, path: FieldPath) -> Iterator[Problem]:
    if value or schema.get("minLength") != 1:  # which says that it must not be empty
        yield Problem(path, value, *patterns.WORDS[limit])


_EXPLAIN: dict[str, Callable[[Any, Any, Schema, FieldPath], Iterator[Problem]]] = {
    "required": _missing,
    "type": _type,
    "enum": _enum,
    "pattern": _pattern,
}
