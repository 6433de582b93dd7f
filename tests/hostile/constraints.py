# SPDX-License-Identifier: Apache-2.0
"""Schemas, regular expressions, grammars, choices and structural tags that cost time or memory, or are cyclic."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from attack import Attack, Target

GROUP = "constraints"
LIMIT_S = 35.0
"""A check waits at most 30 s for a worker, and takes at most 2 s of CPU time."""


def attacks() -> Iterator[Attack]:
    """Yield all attacks of this group."""
    for kind, values in _constraints().items():
        for name, value in values.items():
            for path, prompt in (
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ):
                body = {"model": "tales", "max_tokens": 4, "structured_outputs": {kind: value}, **prompt}
                yield Attack(GROUP, f"{path} {kind}: {name}", partial(_send, path=path, body=body), LIMIT_S)


async def _send(target: Target, path: str, body: dict[str, Any]) -> str:
    return await target.post(path, body)


def _constraints() -> dict[str, dict[str, Any]]:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    wide = {f"k{i}": {"type": "string"} for i in range(5000)}
    refs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {"type": "null"}}
    schemas: dict[str, Any] = {
        "own reference": {"$ref": "#"},
        "cycle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "cycle of allOf": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        "remote": {"$ref": "http://127.0.0.1:1/schema"},
        "file": {"$ref": "file:///etc/passwd"},
        "missing": {"$ref": "#/$defs/none"},
        "exponential references": {"$ref": "#/$defs/d0", "$defs": refs},
        "anyOf of 10,000": {"anyOf": [{"const": i} for i in range(10_000)]},
        "oneOf of 1,000": {"oneOf": [{"type": "object", "properties": {f"k{i}": {}}} for i in range(1000)]},
        "enum of 100,000": {"enum": [f"value {i}" for i in range(100_000)]},
        "deep": deep,
        "wide": {"type": "object", "properties": wide, "required": list(wide)},
        "patternProperties": {"type": "object", "patternProperties": {f"^a{{{i}}}$": {} for i in range(1, 200)}},
        "slow pattern": {"type": "string", "pattern": "^(a+)+$"},
        "large repetition": {"type": "string", "pattern": "a{1,1000000000}"},
        "length": {"type": "string", "minLength": 10**9},
        "items": {"type": "array", "minItems": 10**9, "items": {"type": "string"}},
        "range": {"type": "integer", "minimum": -(2**63), "maximum": 2**63},
        "float": {"type": "number", "minimum": 1e-300, "maximum": 1e300},
        "multiple": {"type": "integer", "multipleOf": 10**18 + 9},
        "type": {"type": ["a"] * 1000},
        "not an object": [1, 2],
        "text": "{",
        "number": 5,
    }
    regexes = {
        "nested": "(a+)+$",
        "alternatives": "(a|a)*b",
        "repetition": "a{1,1000000000}",
        "nested repetitions": "((a{1,1000}){1,1000}){1,1000}",
        "groups": "(" * 5000 + "a" + ")" * 5000,
        "class": "[" + "".join(map(chr, range(0x4E00, 0x9FFF))) + "]{500}",
        "look-ahead": "(?=a)b",
        "back-reference": r"(a)\1",
        "lazy": ".*?" * 500,
        "unbalanced": "((",
        "empty": "",
        "NUL": "\0",
        "large": "a|" * 200_000 + "b",
    }
    grammars = {
        "left recursion": 'start: start "a" | "b"',
        "endless": "start: start",
        "undefined": "start: b",
        "repetition": 'start: "a"~1..1073741824',
        "ambiguous": 'start: x x x x x x\nx: "a"* | x x',
        "rules": "start: r0\n" + "\n".join(f'r{i}: r{i + 1} | "a"' for i in range(3000)) + '\nr3000: "b"',
        "deep": "start: " + "(" * 3000 + '"a"' + ")" * 3000,
        "empty": "",
        "text": "%%%",
        "GBNF": 'root ::= root root | "a"',
        "import": "%import common.WORD\nstart: WORD",
        "json": 'start: %json {"$ref": "#"}',
    }
    choices = {
        "many": [f"choice {i}" for i in range(50_000)],
        "long": ["x" * 500_000],
        "equal": ["a"] * 10_000,
        "empty": [],
        "empty text": [""],
    }
    tag = {"begin": "<a>", "structure": {"type": "object"}, "end": "</a>"}
    tags = {
        "many": {"structures": [tag] * 2000, "triggers": ["<a>"]},
        "without triggers": {"structures": [tag], "triggers": []},
        "empty begin": {"structures": [tag | {"begin": ""}], "triggers": [""]},
        "cycle": {"structures": [tag | {"structure": {"$ref": "#"}}], "triggers": ["<"]},
    }
    return {"json": schemas, "regex": regexes, "grammar": grammars, "choice": choices, "structural_tag": tags}
