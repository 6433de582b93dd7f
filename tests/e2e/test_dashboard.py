# SPDX-License-Identifier: Apache-2.0
"""The chart's dashboard uses valid PromQL, and only metrics and labels that a running pod exports."""

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
"""Labels that Prometheus adds to samples scraped through a PodMonitor."""
VARIABLES = {"namespace", "model", "pod", "datasource"}


def expressions():
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def parsed(expression):
    return promql_parser.parse(expression.replace("$__rate_interval", "5m").replace("$", ""))


def selectors(tree):
    """Return every selector of an expression with the labels of the aggregations around it."""
    result, stack = [], [(tree, set())]
    while stack:
        node, labels = stack.pop()
        if isinstance(node, promql_parser.AggregateExpr):
            labels = labels | set(node.modifier.labels if node.modifier else ())
        if isinstance(node, promql_parser.VectorSelector):
            result.append((node, labels))
        children = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "param", "vector_selector")]
        children += list(getattr(node, "args", None) or ())
        stack += [(child, labels) for child in children if isinstance(child, EXPRESSIONS)]
    return result


EXPRESSIONS = (
    promql_parser.AggregateExpr, promql_parser.BinaryExpr, promql_parser.Call, promql_parser.MatrixSelector,
    promql_parser.NumberLiteral, promql_parser.ParenExpr, promql_parser.UnaryExpr, promql_parser.VectorSelector,
)  # fmt: skip


SUFFIXES = {"counter": ("_total", ""), "histogram": ("_bucket", "_count", "_sum")}


@pytest.fixture(scope="module")
def exported(service):
    """Return labels by sample name, after every kind of traffic that the panels show."""
    service.generate("sql", "Once upon a time", max_tokens=4, ignore_eos=True)
    service.generate("tales", "Once upon a time", max_tokens=4, ignore_eos=True)
    service.generate("tales", "Once upon a time", lora_name="unknown")
    labels = {}
    for family in text_string_to_metric_families(service.metrics()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
        for suffix in SUFFIXES.get(family.type, ("",)):
            labels.setdefault(family.name + suffix, set())
    return labels | operator_metrics()


def operator_metrics():
    """Return the labels of the operator's metrics from its registry; they have no samples before it runs."""
    labels = {}
    for collector in ControllerMetrics().registry._collector_to_names:
        for suffix in SUFFIXES.get(collector._type, ("",)):
            labels[collector._name + suffix] = {*collector._labelnames, "le"}
    return labels


@pytest.mark.server
def test_every_metric_and_label_is_exported(exported):
    missing = []
    for expression in expressions():
        expression_selectors = selectors(parsed(expression))
        assert expression_selectors, expression
        for selector, group_labels in expression_selectors:
            known = exported.get(selector.name)
            if known is None:
                missing.append(selector.name)
                continue
            used = {matcher.name for matcher in selector.matchers.matchers} | group_labels
            # A family without samples, such as swapping without swap space, has no known labels.
            missing += [f"{selector.name}{{{label}}}" for label in used - known - TARGETS if known]
    assert missing == []


@pytest.mark.server
def test_variables_query_exported_metrics(exported):
    for variable in DASHBOARD["templating"]["list"][1:]:
        metric, label = re.fullmatch(r"label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)", variable["query"]).groups()
        assert metric in exported
        assert label in exported[metric] | TARGETS
        assert set(re.findall(r"\$(\w+)", variable["query"])) <= VARIABLES


def test_panels_have_titles_descriptions_and_do_not_overlap():
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    used_cells = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        cells = {(grid["x"] + dx, grid["y"] + dy) for dx in range(grid["w"]) for dy in range(grid["h"])}
        assert not cells & used_cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        used_cells |= cells
    for panel in PANELS:
        assert panel["description"]
        for target in panel["targets"]:
            assert set(re.findall(r"\$(?!__)\{?(\w+)", target["expr"])) <= VARIABLES
            assert not (set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - group_labels(target["expr"]))


def group_labels(expression):
    return set().union(*(labels for _, labels in selectors(parsed(expression))))
