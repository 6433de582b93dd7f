# SPDX-License-Identifier: Apache-2.0
"""Keys of rank_pattern and alpha_pattern select the same modules as in PEFT, in bounded time."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from quire_engine.lora.peft.module_pattern import ModulePattern
from quire_engine.lora.peft.regex_matcher import RegexMatcher, is_safe_regex
from quire_spec.errors import InvalidArgument

LINEARS = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
MODULES = [f"model.layers.{layer}.{linear}" for layer in (0, 1, 10, 11, 111) for linear in LINEARS] + ["lm_head"]
# Parts of module names and of expressions, in any order. Dots and underscores match each other.
PARTS = st.sampled_from(
    [
        "model", "layers", "1", "11", "self_attn", "mlp", "q_proj", "up_proj", "q", "proj", "lm_head", "_", ".1.",
        ".", r"\.", "^", "$", ".*", r"\d+", r"\w", "[0-9]", "(", ")", "(?:", "|", "?", "+", "{2}", "(?=",
    ]
)  # fmt: skip
KEYS = st.one_of(
    st.sampled_from(MODULES).flatmap(
        lambda name: st.tuples(
            st.integers(0, len(name)), st.sampled_from(["", "^"]), st.sampled_from(["_", "1", "x"])
        ).map(lambda cut: cut[1] + name[cut[0] :].replace(cut[2], "."))
    ),
    st.lists(PARTS, min_size=1, max_size=8).map("".join),
)


def _is_valid(key: str) -> bool:
    try:
        re.compile(key)
    except re.error:
        return False
    return is_safe_regex(key)


@given(st.lists(KEYS.filter(_is_valid), unique=True, max_size=6))
def test_the_first_key_that_matches_is_the_one_of_peft(keys: list[str]) -> None:
    pattern = ModulePattern({key: index for index, key in enumerate(keys)}, RegexMatcher())
    for module in MODULES:
        key = get_pattern_key(keys, module)
        assert pattern.get(module, -1) == (keys.index(key) if key in keys else -1), (keys, module)


SAFE = [
    r".*\.(?:0|1)\..*\.(?:q|v)_proj",
    r"(?:model\.)?layers\.[0-9]+\.mlp\.(?:up|down)_proj",
    ".*layers.*self_attn.*q.*",
    r"model\.layers\.(?:[0-9]|1[0-5])\..*",
    r"^(?!.*visual).*\.(?:q_proj|k_proj|gate_proj)$",
    "(q|k|v)_proj",
    "(?:a|b)*c",
    "(a|ab)(c|bcd)*x",
    r"layers\.\d{1,2}\.x",
]
SLOW = [
    r"([\w.]+)+x",
    "(a|a)*x",
    "(.|.)" * 40 + "x",
    "(a|aa)" * 40 + "x",
    "(?:.?.?)*x",
    ".*" * 5 + "x",
    ".?" * 30 + "x",
    "(?:(?:a?)+)+x",
    r"(.*)\1x",
    "(?i:a)",
    "(?#a)",
    "(?<=a)b",
]


@pytest.mark.parametrize("expression", SAFE)
def test_harmless_expressions_are_safe(expression: str) -> None:
    assert is_safe_regex(expression)


@pytest.mark.parametrize("expression", SLOW)
def test_expressions_that_could_take_long_are_not_safe(expression: str) -> None:
    assert not is_safe_regex(expression)


@given(st.lists(PARTS, max_size=40).map("".join).filter(_is_valid))
def test_a_safe_expression_is_quick(expression: str) -> None:
    compiled = re.compile(rf"(?:.*\.)?(?:{expression})")
    for path in ("model.language_model.layers.111.self_attn.o_proj", "q" * 48, "_1" * 24):
        started_at = time.thread_time()
        compiled.fullmatch(path)
        assert time.thread_time() - started_at < 0.1


HOSTILE = {
    "no module": [f"model.layers.{1000 + i}.self_attn.x_proj" for i in range(4096)],
    "same length": [f"model.layers.{100 + i % 900}.self_attn.{'abcde'[i // 900]}_proj" for i in range(4096)],
    "one key per module": [f"model.layers.{layer}.{linear}" for layer in range(80) for linear in LINEARS],
}


@pytest.mark.parametrize("keys", HOSTILE.values(), ids=HOSTILE)
def test_many_keys_and_modules_take_little_time(keys: list[str]) -> None:
    modules = [f"model.layers.{layer}.{linear}" for layer in range(100, 180) for linear in LINEARS]
    started_at = time.thread_time()
    pattern = ModulePattern(dict.fromkeys(keys, 4), RegexMatcher())
    ranks = [pattern.get(module, 8) for module in modules for _ in range(3)]
    assert time.thread_time() - started_at < 0.5
    assert len(ranks) == 3 * len(modules)


@pytest.mark.parametrize("key", ["({})?.*.*.*.*x", ".*{}.*y"])
def test_many_expressions_are_rejected_after_a_limit_of_cpu_time(key: str) -> None:
    started_at = time.thread_time()
    pattern = ModulePattern({key.format(i): 4 for i in range(4096)}, RegexMatcher())
    with pytest.raises(InvalidArgument, match=r"regular expressions, such as .* need more than 0\.5 s; use names"):
        for module in MODULES * 20:
            pattern.get(f"x.{module}", 8)
            pattern.get(f"{len(pattern._indexes)}.{module}", 8)
    assert time.thread_time() - started_at < 1
