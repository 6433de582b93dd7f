# SPDX-License-Identifier: Apache-2.0
"""A page has the same samples as the page of prometheus_client after the same calls, whenever it is rendered."""

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from quire_engine.text.metric_series import Registry

LABELS = ["model_name", "adapter"]
BUCKETS = (0.1, 1.0, 2.5)
numbers = st.floats(0, 1e9) | st.sampled_from(BUCKETS)
calls = st.lists(
    st.tuples(
        st.sampled_from(["inc", "set", "observe", "remove", "clear", "render"]),
        st.sampled_from(["", "sql", 'a"b\\c\nd', "é"]),
        numbers,
    ),
    max_size=40,
)


def samples(page: str) -> dict[tuple[str, str, str, frozenset[tuple[str, str]]], float]:
    return {
        (
            family.name,
            family.type,
            family.documentation,
            frozenset({*sample.labels.items(), ("", sample.name)}),
        ): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(calls=calls)
def test_page_equals_the_page_of_prometheus_client(calls: list[tuple[str, str, float]]) -> None:
    own, reference = Registry(), prometheus_client.CollectorRegistry()
    families = (
        own.counter("requests", "All \\ requests.\nTwo lines.", LABELS),
        own.gauge("usage", "Usage.", LABELS),
        own.histogram("seconds", "Time.", LABELS, BUCKETS),
    )
    references = (
        prometheus_client.Counter("requests", "All \\ requests.\nTwo lines.", LABELS, registry=reference),
        prometheus_client.Gauge("usage", "Usage.", LABELS, registry=reference),
        prometheus_client.Histogram("seconds", "Time.", LABELS, buckets=BUCKETS, registry=reference),
    )
    for call, adapter, number in calls:
        for counter, gauge, histogram in (families, references):
            if call == "inc":
                counter.labels("m", adapter).inc(number)
            elif call == "set":
                gauge.labels("m", adapter).set(number)
            elif call == "observe":
                histogram.labels("m", adapter).observe(number)
            elif call == "remove":
                histogram.remove("m", adapter)
            elif call == "clear":
                gauge.clear()
        if call == "render":
            own.text()
    page = prometheus_client.generate_latest(reference).decode()
    assert samples(own.text()) == samples(page)
    heads = [line for line in page.splitlines() if line.startswith("#") and "_created" not in line]
    assert [line for line in own.text().splitlines() if line.startswith("#")] == heads


def test_renamed_page_keeps_values_and_leaves_the_page_itself_unchanged() -> None:
    registry = Registry()
    registry.counter("vllm:tokens", "Tokens.", ["model_name"]).labels("base").inc(3)
    registry.gauge("quire_ready", "Ready.", []).labels().set(1)
    page = registry.text()
    renamed = registry.renamed_text(
        "vllm:", lambda name, labels: (name.replace("tokens", "words"), labels | {"v": "1"})
    )
    assert renamed.splitlines()[-1] == 'vllm:words_total{model_name="base",v="1"} 3.0'
    assert "quire_ready" not in renamed and registry.text() == page
    assert "quire_ready 1.0" in page
