# SPDX-License-Identifier: Apache-2.0
"""The chart's dashboard asks for nothing that a running server does not export, in PromQL that Prometheus reads."""

import json
import re

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.chart import CHART

from quire_operator.controller.metrics import ControllerMetrics

DASHBOARD = json.loads((CHART / "files/dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = {"namespace", "pod"}
"""Labels that Prometheus adds to what it scrapes through a PodMonitor."""
VARIABLES = {"namespace", "model", "pod", "datasource"}


def expressions():
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def parsed(expression):
    return promql_parser.parse(expression.replace("$__rate_interval", "5m").replace("$", ""))


def selectors(tree):
    """Every selector below an expression, with the labels that it is grouped by on the way."""
    found, stack = [], [(tree, set())]
    while stack:
        node, labels = stack.pop()
        if isinstance(node, promql_parser.AggregateExpr):
            labels = labels | set(node.modifier.labels if node.modifier else ())
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node, labels))
        inner = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "param", "vector_selector")]
        inner += list(getattr(node, "args", None) or ())
        stack += [(child, labels) for child in inner if isinstance(child, EXPRESSIONS)]
    return found


EXPRESSIONS = (
    promql_parser.AggregateExpr, promql_parser.BinaryExpr, promql_parser.Call, promql_parser.MatrixSelector,
    promql_parser.NumberLiteral, promql_parser.ParenExpr, promql_parser.UnaryExpr, promql_parser.VectorSelector,
)  # fmt: skip


@pytest.fixture(scope="module")
def exported(service):
    """Labels by sample name, after traffic of every kind that panels are about."""
    service.generate("sql", "Once upon a time", max_tokens=4, ignore_eos=True)
    service.generate("tales", "Once upon a time", max_tokens=4, ignore_eos=True)
    service.generate("tales", "Once upon a time", lora_name="nobody")
    labels = {}
    for family in text_string_to_metric_families(service.metrics()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
        for suffix in ("_total", "") if family.type == "counter" else ("",):
            labels.setdefault(family.name + suffix, set())
    return labels | of_the_operator()


def of_the_operator():
    """The same of the operator's metrics, which have no samples before it works: by its registry."""
    labels = {}
    for collector in ControllerMetrics().registry._collector_to_names:
        for suffix in {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(collector._type, ("",)):
            labels[collector._name + suffix] = {*collector._labelnames, "le"}
    return labels


@pytest.mark.server
def test_every_metric_and_label_is_exported(exported):
    missing = []
    for expression in expressions():
        found = selectors(parsed(expression))
        assert found, expression
        for selector, grouped in found:
            known = exported.get(selector.name)
            if known is None:
                missing.append(selector.name)
                continue
            asked = {matcher.name for matcher in selector.matchers.matchers} | grouped
            # A family without a sample, such as swapping where there is no swap space, tells no labels.
            missing += [f"{selector.name}{{{label}}}" for label in asked - known - TARGETS if known]
    assert missing == []


@pytest.mark.server
def test_variables_are_asked_of_metrics_that_are_there(exported):
    for variable in DASHBOARD["templating"]["list"][1:]:
        metric, label = re.fullmatch(r"label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)", variable["query"]).groups()
        assert metric in exported
        assert label in exported[metric] | TARGETS
        assert set(re.findall(r"\$(\w+)", variable["query"])) <= VARIABLES


def test_panels_have_titles_reasons_and_their_own_place():
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for panel in PANELS:
        assert panel["description"]
        for target in panel["targets"]:
            assert set(re.findall(r"\$(?!__)\{?(\w+)", target["expr"])) <= VARIABLES
            assert not (set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - grouped(target["expr"]))


def grouped(expression):
    return set().union(*(labels for _, labels in selectors(parsed(expression))))
