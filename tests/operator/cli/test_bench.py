# SPDX-License-Identifier: Apache-2.0
"""`quire bench` without a server: requests, figures, the comparison of outputs, the report and the chart."""

import itertools
import math
import re
import statistics
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_operator.cli.bench import svg
from quire_operator.cli.bench.client import Outcome, Token
from quire_operator.cli.bench.figures import latencies_s, percentile, summarize
from quire_operator.cli.bench.outputs import MAX_TIE, Comparison, OutputCheck, compare, count_problem
from quire_operator.cli.bench.report import format_report
from quire_operator.cli.bench.workload import Load, Request, Workload, model_weights, read_dataset
from quire_spec.errors import ConfigError

REQUEST = Request("tales", "Hello", 4)
SECONDS = st.floats(1e-4, 100)


def outcome(text="", started_at=0.0, arrivals=(1.0, 2.0, 3.0, 4.0), model="tales", **fields):
    made = Outcome(Request(model, "Hello", 4), started_at, list(arrivals), arrivals[-1], text)
    made.num_input_tokens, made.num_output_tokens, made.finish_reason = 7, 4, "length"
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@given(st.lists(st.integers(), min_size=1), st.sampled_from([50, 90, 95, 99]))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(values, p):
    found = percentile(sorted(values), p)
    assert sum(value <= found for value in values) >= p / 100 * len(values)
    assert sum(value < found for value in values) < p / 100 * len(values)


@given(st.lists(SECONDS, min_size=2, max_size=20), SECONDS)
def test_the_latencies_of_a_request_add_up(gaps, started_at):
    arrivals = list(itertools.accumulate(gaps, initial=started_at))[1:]
    latencies = latencies_s(outcome(started_at=started_at, arrivals=arrivals, num_output_tokens=len(arrivals)))
    total = latencies["ttft"] + (len(arrivals) - 1) * latencies["tpot"]
    assert math.isclose(total, latencies["e2el"], rel_tol=1e-6)
    assert math.isclose(latencies["tpot"], statistics.mean(gaps[1:]), rel_tol=1e-6)


def test_the_figures_of_a_load():
    fast = outcome(arrivals=(0.1, 0.2, 0.3, 0.4))
    slow = outcome(arrivals=(1.0, 1.1, 1.2, 1.3), model="sql")
    failed = outcome(error="status 429: busy")
    limits = {"ttft": 500.0, "tpot": 150.0}
    figures = summarize(Load(concurrency=2), [fast, slow, failed], [slow], 2.0, limits)
    assert (figures["requests"], figures["failed_requests"], figures["errors"]) == (3, 1, {"status 429: busy": 1})
    assert (figures["input_tokens"], figures["output_tokens"]) == (21, 12)
    assert figures["output_tokens_per_s"] == 6 and figures["requests_per_s"] == 1.5
    assert figures["ttft_ms"]["p50"] == pytest.approx(100) and figures["ttft_ms"]["p99"] == pytest.approx(1000)
    assert figures["itl_ms"]["mean"] == figures["tpot_ms"]["mean"] == pytest.approx(100)
    assert figures["goodput"] == {"share": 0.5, "requests_per_s": 0.75}
    assert {name: model["requests"] for name, model in figures["models"].items()} == {"sql": 1, "tales": 1}


def tokens(*pairs):
    return [Token(text, {text: best, other: best - gap}) for text, other, best, gap in pairs]


@pytest.mark.parametrize(
    ("alone", "loaded", "expected"),
    [
        (outcome("abc"), outcome("abc"), Comparison.SAME),
        (outcome("abc"), outcome("abc", num_output_tokens=3), Comparison.DIFFERENT),
        (outcome("abc"), outcome("abd"), Comparison.DIFFERENT),
        (
            outcome("ab", tokens=tokens(("a", "x", -0.1, 4), ("b", "c", -0.7, MAX_TIE))),
            outcome("ac", tokens=tokens(("a", "x", -0.1, 4), ("c", "b", -0.7, 0))),
            Comparison.NEAR_TIE,
        ),
        (
            outcome("ab", tokens=tokens(("a", "x", -0.1, 4), ("b", "c", -0.1, 2 * MAX_TIE))),
            outcome("ac", tokens=tokens(("a", "x", -0.1, 4), ("c", "b", -0.1, 0))),
            Comparison.DIFFERENT,
        ),
        (
            outcome("ab", tokens=tokens(("a", "x", -0.1, 0), ("b", "c", -0.1, 0))),
            outcome("yb", tokens=tokens(("y", "x", -0.1, 0), ("b", "c", -0.1, 0))),
            Comparison.DIFFERENT,
        ),
    ],
)
def test_only_a_near_tie_excuses_another_output(alone, loaded, expected):
    assert compare(alone, loaded) is expected
    check = OutputCheck()
    check.add(alone, loaded, "concurrency 8")
    assert check.num_compared == 1 and len(check.examples) == (expected is Comparison.DIFFERENT)


@pytest.mark.parametrize(
    ("count", "reason", "is_wrong"), [(4, "length", 0), (3, "stop", 0), (3, "length", 1), (5, "stop", 1)]
)
def test_a_wrong_number_of_tokens_is_a_problem(count, reason, is_wrong):
    assert bool(count_problem(outcome(num_output_tokens=count, finish_reason=reason))) == bool(is_wrong)


def test_requests_repeat_with_their_seed_and_differ_between_loads():
    workload = Workload({"sql": 3.0, "pirate": 1.0}, (8, 16), (4, 6), seed=1)
    first = [workload.request("load a", i) for i in range(400)]
    assert first == [workload.request("load a", i) for i in range(400)]
    assert {request.prompt for request in first}.isdisjoint(workload.request("load b", i).prompt for i in range(400))
    assert 260 < sum(request.model == "sql" for request in first) < 340
    assert {len(request.prompt.split()) for request in first} == {*range(8, 17)}
    assert {request.max_tokens for request in first} == {4, 5, 6}
    arrivals = list(itertools.takewhile(lambda seconds: seconds < 100, workload.arrivals(5.0)))
    assert arrivals[0] == 0 and 400 < len(arrivals) < 600


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sql=3,pirate=1", {"sql": 3, "pirate": 1}),
        ("a=b=2", {"a=b": 2}),
        ("uniform", {"sql": 1, "tools": 1}),
        ("zipf", {"sql": 1, "tools": 0.5}),
        ("zipf:2", {"sql": 1, "tools": 0.25}),
    ],
)
def test_weights_of_models(text, expected):
    assert model_weights(text, ["sql", "tools"]) == expected


@pytest.mark.parametrize("text", ["sql", "sql=x", "sql=-1", "sql=1,sql=2", "=1", "sql=0", "zipf:x", "sql=inf", ""])
def test_wrong_weights_are_named(text):
    with pytest.raises(ConfigError, match="--adapters"):
        model_weights(text, ["sql"])
    with pytest.raises(ConfigError, match="lists no adapters"):
        model_weights("uniform", [])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", 'neither "prompt"'),
        ('{"prompt": 1}', 'neither "prompt"'),
        ('{"messages": []}', "--endpoint chat"),
        ('{"prompt": "x", "output_tokens": 0}', "output_tokens 0"),
    ],
)
def test_a_wrong_line_of_a_dataset_is_named(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "ok"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=f"^--dataset {file}:3: .*{message}"):
        read_dataset(file, "completions")


def test_lines_of_a_dataset_are_sent_in_their_order_over_all_loads(tmp_path):
    (tmp_path / "prompts.txt").write_text("one\ntwo\n\nthree\n")
    dataset = read_dataset(tmp_path / "prompts.txt", "completions")
    workload = Workload({"tales": 1.0}, (1, 1), (9, 9), 0, dataset=dataset)
    assert [workload.request("load", i, offset=2).prompt for i in range(3)] == ["three", "one", "two"]


LOADS = st.lists(st.integers(1, 4096).map(Load)) | st.lists(st.floats(0.01, 1e4).map(lambda rate: Load(None, rate)))
ARRIVALS = st.lists(st.lists(SECONDS, min_size=4, max_size=4).map(sorted), max_size=3)


@st.composite
def figures_of_loads(draw):
    loads = draw(LOADS.filter(bool))
    values = [[outcome(arrivals=arrivals) for arrivals in draw(ARRIVALS)] for _ in loads]
    return [summarize(load, done, [], 2.0, {"ttft": 300.0}) for load, done in zip(loads, values, strict=True)]


@given(figures_of_loads(), st.text())
def test_every_report_and_chart_is_complete(loads, title):
    report = format_report(loads, OutputCheck(num_same=3, num_near_ties=1), "utf-8")
    assert all(name in report for name in ("TTFT", "TPOT", "ITL", "E2E", "p99")) and "batch-invariant" in report
    assert format_report(loads, OutputCheck(), "ascii").isascii()
    # The names of models have no characters that XML cannot contain.
    printable = "".join(c for c in title if c.isprintable() or c in "<>&'\"")
    root = ET.fromstring(svg.chart(printable, loads, {"ttft": 300.0}))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert printable in [node.text or "" for node in root.iter() if node.tag.endswith("text")]
    for circle in (node for node in root.iter() if node.tag.endswith("circle")):
        assert -20 <= float(circle.attrib["cy"]) <= 200 and 0 <= float(circle.attrib["cx"]) <= 300
    assert width > 3 * 300 and height > 200
    assert not re.search(r"\b(nan|inf)\b", ET.tostring(root, "unicode").replace(printable, ""))
