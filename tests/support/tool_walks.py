# SPDX-License-Identifier: Apache-2.0
"""Random tools, and random walks through the grammars of their calls. A walk is any output that a grammar allows."""

import random
from typing import Any

import numpy as np

from quire_engine.structured_outputs.grammar import Grammar
from quire_engine.tokenization.tokenizer import Tokenizer

MAX_TOKENS = 400
NAMES = ("f", "get-weather", "a/b.c:d", "class", "g_1")
KEYS = ("n", "from", "class", "a-b", "x.y", "unit_é", "type", "name", "arguments", "a/b")
FRAGMENTS = (
    *("</tool_call>", "<tool_call>", "\n</parameter>\n", "</parameter>", "<parameter=n>\n", "</function>", "</think>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_end|>", "<|end|>", "<|call|>", '"}]', "}}", "')", "\\n"),
    *("</arg_value>", "<arg_key>", "<escape>", '<|"|>', "<tool_call|>", "</function_calls>", "```"),
    *("1e400", "-1E4000", "12345678901234567890", "null", '{"name": "f", "parameters": {}}', "[f(n=1)]", "🙂", "日"),
)
"""Texts that a walk writes wherever the grammar allows it: marks inside strings, numbers that Python does not have."""
_DEFINITIONS = {
    "item": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "day": {"type": "string", "format": "date"},
    "Box[int]": {"type": "integer", "minimum": 3},
    "node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}},
}
_LEAVES: tuple[Any, ...] = (
    *({"type": name} for name in ("string", "integer", "number", "boolean", "null")),
    *({}, True, {"type": ["string", "null"]}, {"type": ["integer", "string"]}, {"type": "object"}, {"type": "array"}),
    *({"enum": [1, 2, 3]}, {"const": 5}, {"enum": ["x", "y z", "1"]}, {"enum": ["a", 1, None]}, {"const": "true"}),
    *(
        {"type": "string", "enum": ['"q"', "null", "</parameter>"]},
        {"type": "string", "const": "\n a\n"},
        {"const": ""},
    ),
    *({"type": "string", "format": f} for f in ("date", "date-time", "email", "uuid", "ipv4", "password")),
    *({"type": "string", "pattern": p} for p in ("^[A-Z]{3}$", r"^\d+$", "^a", "<")),
    *({"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}, {"pattern": r"^\d$"}, {"minimum": 3}),
    *({"type": "integer", "minimum": -(2**63)}, {"type": "number", "minimum": 0, "maximum": 1}, {"maxLength": 4}),
    *({"$ref": f"#/$defs/{name}"} for name in _DEFINITIONS),
)


def random_schema(rng: random.Random, depth: int = 2) -> Any:
    """Return the schema of a value. References point to the definitions of `random_tool`."""
    kind = rng.choice(("leaf", "leaf", "leaf", "any", "all", "array", "object")) if depth else "leaf"
    if kind == "any":
        return {"anyOf": [random_schema(rng, depth - 1), rng.choice(({"type": "null"}, random_schema(rng, depth - 1)))]}
    if kind == "all":
        return {"allOf": [random_schema(rng, depth - 1)]}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": rng.choice((1, 2.0))}
    if kind == "object":
        return random_object(rng, depth - 1)
    return rng.choice(_LEAVES)


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    """Return the schema of an object."""
    names = rng.sample(KEYS, rng.randint(0, 3))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
    }
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def random_tool(rng: random.Random, name: str, is_strict: bool) -> dict[str, Any]:
    """Return a tool in the form of the OpenAI API."""
    schema = random_object(rng, 2)
    if rng.random() < 0.2:
        schema.pop("additionalProperties", None)
        schema = {"allOf": [schema, {"$ref": "#/$defs/item"}]}
    parameters = {**schema, "$defs": _DEFINITIONS}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": is_strict}}


def walk(grammar: Grammar, tokenizer: Tokenizer, eos_token_id: int, rng: random.Random) -> list[int] | None:
    """Return the tokens of a random output without its end. Return None if the output is still not complete after
    MAX_TOKENS tokens."""
    closing = _closing_tokens(tokenizer)
    token_ids: list[int] = []
    for _ in range(MAX_TOKENS):
        if rng.random() < 0.1 and not grammar.is_terminated:
            _write_fragment(grammar, tokenizer, token_ids, rng)
        mask = np.unpackbits(np.frombuffer(grammar.matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask)
        # Without a preference for tokens that close something, most outputs would never end.
        close = allowed[np.isin(allowed, closing)]
        is_closing = len(close) and rng.random() < 0.1 + len(token_ids) / MAX_TOKENS
        if eos_token_id in allowed and (is_closing or len(allowed) == 1 or rng.random() < 0.3):
            assert grammar.accept_token(eos_token_id)
            return token_ids
        token_id = int(rng.choice(close if is_closing else allowed[allowed != eos_token_id]))
        assert grammar.accept_token(token_id), grammar.error
        token_ids.append(token_id)
    return None


def _write_fragment(grammar: Grammar, tokenizer: Tokenizer, token_ids: list[int], rng: random.Random) -> None:
    for token_id in tokenizer.encode(rng.choice(FRAGMENTS), add_special_tokens=False):
        if not grammar.matcher.validate_tokens([token_id]):
            return
        assert grammar.accept_token(token_id)
        token_ids.append(token_id)


def _closing_tokens(tokenizer: Tokenizer) -> np.ndarray:
    texts = {i: tokenizer.decode([i]) for i in range(tokenizer.vocab_size)}
    return np.array([i for i, text in texts.items() if text[:1] in tuple('"}])<\n') and text])


def split(rng: random.Random, num: int) -> list[int]:
    """Return the ends of random groups of `num` tokens."""
    ends = sorted(rng.sample(range(1, num), min(num - 1, rng.randint(0, 9)))) if num > 1 else []
    return [*ends, num]
