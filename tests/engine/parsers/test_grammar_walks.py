# SPDX-License-Identifier: Apache-2.0
"""The parser of a format reads each output that the grammar of the format allows, as valid calls of random tools.

`QUIRE_WALKS=2000` sets the number of walks for each format.
"""

import json
import os
import random

import jsonschema
import pytest
from support.parser_vectors import TOOL_CALL_FORMATS as TOOL_CALL_PARSERS
from support.parser_vectors import make_tokenizers
from support.tool_walks import NAMES, random_tool, split, walk

from quire_engine import SamplingParams
from quire_engine.parsers.formats.tool_formats import TOOL_FORMATS
from quire_engine.parsers.output_grammar import compose_grammar
from quire_engine.parsers.output_parser import create_parser
from quire_engine.parsers.parser_names import ParserNames
from quire_engine.structured_outputs.compiler import GrammarCompiler
from quire_engine.structured_outputs.grammar_text import compose_grammar_text
from quire_engine.tokenization.detokenizer import IncrementalDetokenizer
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.parsed_output import OutputParsing, ParsedOutput, merge_events

EOS = 1
FORMATS = {TOOL_FORMATS.get(name): name for name in reversed(TOOL_CALL_PARSERS)}.values()
"""One name of each format."""
NUM_WALKS = int(os.environ.get("QUIRE_WALKS", "60"))
ANSWER = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return make_tokenizers(tmp_path_factory.mktemp("tokenizer"))


def parse(names: ParserNames, tokenizer: Tokenizer, tools, token_ids, ends, **options: bool) -> ParsedOutput:
    """Parse an output whose tokens arrive in groups that end at `ends`."""
    parser = create_parser(names, tokenizer, tools=tools, **options)
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=False))
    events, start = [], 0
    for end in ends:
        group, finished = token_ids[start:end], end == ends[-1]
        events += parser.feed(group, detokenizer.update(group, finished).text, finished)
        start = end
    return merge_events(events)


def check_walk(tokenizers: dict[str, Tokenizer], parser: str, seed: int) -> int | None:
    """Check one random output. Return its number of calls; -1 if it has no end, None if the tools are refused."""
    rng = random.Random(f"{parser} {seed}")
    tokenizer = tokenizers["special" if parser == "openai" else rng.choice(sorted(tokenizers))]
    reasoning_parser = "openai_gptoss" if parser == "openai" else rng.choice((None, "qwen3"))
    names, state = ParserNames(parser, reasoning_parser), rng.choice(("possible", "open", "done"))
    parsing = OutputParsing(rng.choice(("required", "auto")), parallel_tool_calls=rng.random() < 0.7)
    names_of_tools = rng.sample(NAMES, rng.randint(1, 2))
    tools = [random_tool(rng, name, is_strict=i == 0) for i, name in enumerate(names_of_tools)]
    # Other arguments than those of strict tools are any object.
    schemas = {
        tool["function"]["name"]: {"$defs": tool["function"]["parameters"]["$defs"], "type": "object"}
        if parsing.tool_choice == "auto" and not tool["function"]["strict"]
        else tool["function"]["parameters"]
        for tool in tools
    }
    answer = {"json": ANSWER} if parsing.tool_choice == "auto" and rng.random() < 0.4 else None
    try:
        constraint = compose_grammar(names, tokenizer, parsing, tools, state, answer)
        grammar = GrammarCompiler(tokenizer, tokenizer.vocab_size, [EOS]).create(compose_grammar_text(constraint))
    except InvalidArgument:
        return None
    if (token_ids := walk(grammar, tokenizer, EOS, rng)) is None:
        return -1
    options = {
        "is_reasoning_open": reasoning_parser == "qwen3" and state == "open",
        "has_constrained_answer": answer is not None,
    }
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    output = parse(names, tokenizer, tools, token_ids, [len(token_ids)], **options)
    context = f"{parsing} {reasoning_parser} {state}\n{text}\n{output}\n{json.dumps(schemas)[:500]}"
    assert parse(names, tokenizer, tools, token_ids, split(rng, len(token_ids)), **options) == output, context
    for call in output.tool_calls:
        validator = jsonschema.Draft202012Validator(schemas[call.name], format_checker=CHECKER)
        try:
            validator.validate(json.loads(call.arguments))
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(f"{str(error)[:300]}\n{context}") from None
    if answer is not None and not output.tool_calls:
        jsonschema.validate(json.loads(output.content), ANSWER)
    if parsing.tool_choice == "required":
        assert output.tool_calls and not output.content, context
        assert parsing.parallel_tool_calls or len(output.tool_calls) == 1, context
    return len(output.tool_calls)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("parser", FORMATS)
def test_outputs_of_the_grammar_are_read_as_valid_calls(tokenizers: dict[str, Tokenizer], parser: str) -> None:
    results = [check_walk(tokenizers, parser, seed) for seed in range(NUM_WALKS)]
    num_refused, num_endless = results.count(None), results.count(-1)
    num_calls = sum(result for result in results if result is not None and result > 0)
    print(f"{parser}: {NUM_WALKS} walks, {num_refused} refused, {num_endless} without an end, {num_calls} calls")
    assert num_refused <= NUM_WALKS / 3 and num_endless <= NUM_WALKS / 3 and num_calls >= NUM_WALKS / 3
