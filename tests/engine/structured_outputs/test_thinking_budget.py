# SPDX-License-Identifier: Apache-2.0
"""A budget of the reasoning: any tokens until it is used up, then the end mark, and nothing behind it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.openai_front import TINY

from quire_engine import LLM, SamplingParams, StructuredOutputsParams
from quire_engine.structured_outputs.compiler import GrammarCompiler
from quire_engine.structured_outputs.grammar_text import to_grammar_text
from quire_engine.structured_outputs.thinking_budget import ThinkingBudget
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import InvalidArgument

START, END, OTHERS = [1, 2], [3, 4, 3], list(range(6))
TOKENS = st.lists(st.sampled_from(OTHERS), max_size=30)


def find(tokens, mark, start=0):
    """Return the index behind the first occurrence of a mark; None if there is none."""
    return next((i + len(mark) for i in range(start, len(tokens)) if tokens[i : i + len(mark)] == mark), None)


@given(TOKENS, TOKENS, st.integers(0, 8), st.booleans())
def test_an_output_has_at_most_the_budget_before_the_end_mark(prompt, wishes, num_tokens, has_start):
    start = START if has_start else []
    budget = ThinkingBudget(num_tokens, start, END, prompt if has_start else ())
    output = []
    for wish in wishes:
        forced = budget.forced_token_id
        output.append(wish if forced is None else forced)
        assert budget.accept_token(output[-1], forced)
    marks = [i for i, pair in enumerate(pairwise(prompt)) if list(pair) == START]
    prompt_begin = marks[-1] + 2 if marks and find(prompt, END, marks[-1]) is None else None
    tokens, begin = (prompt + output, prompt_begin) if has_start and prompt_begin is not None else (output, None)
    if begin is None:
        begin = find(output, START) if has_start else 0
    if begin is None:
        assert output == wishes
        return
    end = find(tokens, END, begin)
    num_thoughts = (len(tokens) if end is None else end - len(END)) - begin
    num_prompt_thoughts = len(prompt) - begin if tokens is not output else 0
    assert num_thoughts <= max(num_tokens, num_prompt_thoughts) + len(END) - 1
    if end is not None:
        first_free = end - (len(prompt) if tokens is not output else 0)
        assert output[first_free:] == wishes[first_free:], "nothing is forced behind the reasoning"


def test_a_constraint_delays_the_mark_to_the_end_of_a_character():
    tokenizer = Tokenizer(TINY)
    [end] = tokenizer.encode("</think>", add_special_tokens=False)
    text = StructuredOutputsParams(grammar=f'start: TEXT <[{end}]> "yes"\nTEXT: /(.|\\n)*/')
    grammar = GrammarCompiler(tokenizer, tokenizer.vocab_size, [1]).create(to_grammar_text(text))
    grammar.thinking_budget = ThinkingBudget(1, [], [end])
    parts = tokenizer.encode("日", add_special_tokens=False)
    assert len(parts) == 3
    for part in parts:
        assert grammar.forced_token_id is None
        assert grammar.accept_token(part)
    assert grammar.forced_token_id == end
    assert grammar.accept_token(end) and grammar.thinking_budget.num_unforced > 100


@pytest.mark.parametrize("is_async", [False, True])
def test_the_engine_ends_the_reasoning(is_async):
    """Alone, with a constraint of the answer, and beside a request without a budget, whose tokens stay the same."""
    llm = LLM(TINY, dtype="float32", device="cpu", async_scheduling=is_async)
    tokenizer = llm.get_tokenizer()
    start, end = (tokenizer.encode(mark, add_special_tokens=False) for mark in ("<think>", "</think>"))
    prompt = {"prompt_token_ids": [*tokenizer.encode("What is 12 plus 7?"), *start]}
    greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "skip_special_tokens": False}
    choice = StructuredOutputsParams(choice=["yes"], begin_after_token_ids=end)
    [free] = llm.generate(prompt, SamplingParams(**greedy), use_tqdm=False)
    assert end[0] not in free.outputs[0].token_ids[:5]
    params = [
        SamplingParams(**greedy),
        SamplingParams(**greedy, thinking_token_budget=4),
        SamplingParams(**greedy, thinking_token_budget=0, structured_outputs=choice),
        SamplingParams(**greedy, thinking_token_budget=-1),
    ]
    outputs = [r.outputs[0] for r in llm.generate([prompt] * 4, params, use_tqdm=False)]
    thoughts = list(free.outputs[0].token_ids)
    assert [list(outputs[i].token_ids) for i in (0, 3)] == [thoughts, thoughts]
    assert list(outputs[1].token_ids[:5]) == [*thoughts[:4], *end] and len(outputs[1].token_ids) == 12
    assert outputs[2].text.startswith("</think>yes") and outputs[2].finish_reason == "stop"
    forbidden = SamplingParams(**greedy, thinking_token_budget=1, logit_bias={}, allowed_token_ids=[5, 6])
    with pytest.raises(InvalidArgument, match="forbid the mark that ends the reasoning"):
        llm.generate(prompt, forbidden, use_tqdm=False)


def test_a_model_with_an_unknown_format_rejects_a_budget():
    llm = LLM(TINY, dtype="float32", device="cpu", reasoning_parser="none")
    with pytest.raises(InvalidArgument, match=r"thinking_token_budget.*reasoning parsers qwen3"):
        llm.generate("a", SamplingParams(thinking_token_budget=3), use_tqdm=False)
