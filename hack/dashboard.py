# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard of the chart, as data: rows of panels, each a title, a unit and queries.

Written to charts/quire/files/dashboard.json by hack/generated.py. Every metric in it is one that pods or the operator
export, which a test holds against a running server.
"""

import json
from collections.abc import Sequence
from typing import Any

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_PODS = 'namespace=~"$namespace",pod=~"$pod"'
_MODEL = f'{_PODS},model_name=~"$model"'
_ANY = ""
"""The operator is in a namespace of its own, so the choice of namespace and pod does not touch it."""
_RATE = "$__rate_interval"
_ADAPTERS_SHOWN = 10

Query = tuple[str, str]
"""An expression and its legend."""


def _rate(metric: str, labels: str = _MODEL, by: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({metric}{{{labels}}}[{_RATE}]))"


def _quantiles(metric: str, labels: str = _MODEL) -> list[Query]:
    buckets = f"sum by (le) (rate({metric}_bucket{{{labels}}}[{_RATE}]))"
    return [(f"histogram_quantile({q}, {buckets})", f"p{round(float(q) * 100)}") for q in ("0.5", "0.95", "0.99")]


def _top(expression: str) -> str:
    return f"topk({_ADAPTERS_SHOWN}, {expression})"


Panel = tuple[str, str, str, Sequence[Query]]
"""Title, what it tells, unit, queries."""

ROWS: tuple[tuple[str, Sequence[Panel]], ...] = (
    (
        "Traffic",
        (
            (
                "Pods ready",
                "Pods that serve the model and every pinned adapter.",
                "short",
                [(f"sum(quire_ready{{{_PODS}}})", "ready"), (f"count(quire_ready{{{_PODS}}})", "there")],
            ),
            (
                "Tokens",
                "Prompt tokens given to the engine, and tokens made.",
                "short",
                [
                    (_rate("vllm:generation_tokens_total"), "made /s"),
                    (_rate("vllm:prompt_tokens_total"), "prompt /s"),
                ],
            ),
            (
                "Requests that ended",
                "By reason: stop and length are answers; abort is a client that left.",
                "reqps",
                [(_rate("vllm:request_success_total", by="finished_reason"), "{{finished_reason}}")],
            ),
            (
                "Requests refused",
                "By code. UNAVAILABLE: more were waiting than spec.engine.maxNumQueuedReqs.",
                "reqps",
                [(_rate("quire_requests_refused_total", by="code"), "{{code}}")],
            ),
            (
                "Running and waiting",
                "Waiting for long: add replicas, or raise spec.engine.maxNumSeqs where KV blocks are free.",
                "short",
                [
                    (f"sum(vllm:num_requests_running{{{_MODEL}}})", "running"),
                    (f"sum(vllm:num_requests_waiting{{{_MODEL}}})", "waiting"),
                    (f"sum(vllm:num_requests_swapped{{{_MODEL}}})", "swapped out"),
                ],
            ),
            (
                "KV cache in use",
                "Share of the blocks, by pod. Near 1 for long: sequences lose their blocks, see preemptions.",
                "percentunit",
                [(f"max by (pod) (vllm:kv_cache_usage_perc{{{_MODEL}}})", "{{pod}}")],
            ),
        ),
    ),
    (
        "Latency",
        (
            (
                "Time to first token",
                "From a request's arrival.",
                "s",
                _quantiles("vllm:time_to_first_token_seconds"),
            ),
            (
                "Between tokens",
                "From one step's tokens of a request to the next's.",
                "s",
                _quantiles("vllm:inter_token_latency_seconds"),
            ),
            ("Whole request", "To its last token.", "s", _quantiles("vllm:e2e_request_latency_seconds")),
            ("Wait for the first step", "In the queue.", "s", _quantiles("vllm:request_queue_time_seconds")),
        ),
    ),
    (
        "Adapters",
        (
            (
                "Adapters by state",
                "Over all pods.",
                "short",
                [(f"sum by (state) (quire_adapters{{{_PODS}}})", "{{state}}")],
            ),
            (
                "Tokens by adapter",
                f"The {_ADAPTERS_SHOWN} busiest.",
                "short",
                [(_top(_rate("quire_adapter_tokens_total", by="adapter")), "{{adapter}}")],
            ),
            (
                "Requests by adapter",
                f"The {_ADAPTERS_SHOWN} busiest.",
                "reqps",
                [(_top(_rate("quire_adapter_requests_total", by="adapter")), "{{adapter}}")],
            ),
            (
                "Time to first token by adapter, p95",
                f"The {_ADAPTERS_SHOWN} slowest. Slow and not resident: raise spec.lora.maxLoaded or pin it.",
                "s",
                [
                    (
                        _top(
                            "histogram_quantile(0.95, sum by (le, adapter) (rate("
                            f"quire_adapter_time_to_first_token_seconds_bucket{{{_MODEL}}}[{_RATE}])))"
                        ),
                        "{{adapter}}",
                    )
                ],
            ),
            (
                "Wait to run by adapter, p95",
                "Long beside a short load: the slots are what is waited for.",
                "s",
                [
                    (
                        _top(
                            "histogram_quantile(0.95, sum by (le, adapter) (rate("
                            f"quire_adapter_queue_seconds_bucket{{{_MODEL}}}[{_RATE}])))"
                        ),
                        "{{adapter}}",
                    )
                ],
            ),
            (
                "Loads, p95",
                "From disk to host memory, and from there to a slot.",
                "s",
                [
                    (
                        "histogram_quantile(0.95, sum by (le, to) (rate("
                        f"quire_adapter_load_seconds_bucket{{{_MODEL}}}[{_RATE}])))",
                        "{{to}}",
                    )
                ],
            ),
            (
                "Requests refused for a limit",
                "Of the adapter: spec.adapters[].limits.",
                "reqps",
                [(_top(_rate("quire_adapter_requests_limited_total", by="adapter")), "{{adapter}}")],
            ),
            (
                "Pods that have it in a slot",
                "By adapter.",
                "short",
                [(_top(f"sum by (adapter) (quire_adapter_slot_residency{{{_MODEL}}})"), "{{adapter}}")],
            ),
            (
                "Slots lost",
                "Adapters that gave their slot to another. Many: raise spec.lora.maxLoaded.",
                "ops",
                [(_rate("quire_adapter_evictions_total", by="pod"), "{{pod}}")],
            ),
        ),
    ),
    (
        "Engine",
        (
            (
                "Prompt tokens found in the cache",
                "Share of what was looked up.",
                "percentunit",
                [(f"{_rate('vllm:prefix_cache_hits_total')} / {_rate('vllm:prefix_cache_queries_total')}", "found")],
            ),
            (
                "Preemptions",
                "Sequences that gave their blocks up, and blocks moved to swap space and back.",
                "ops",
                [
                    (_rate("vllm:num_preemptions_total"), "preempted"),
                    (_rate("quire_swapped_out_blocks_total"), "blocks out"),
                    (_rate("quire_swapped_in_blocks_total"), "blocks in"),
                ],
            ),
            ("Steps", "Of the engine, by pod.", "ops", [(_rate("quire_steps_total", by="pod"), "{{pod}}")]),
            (
                "Swap space in use",
                "Share, by pod.",
                "percentunit",
                [(f"max by (pod) (vllm:cpu_cache_usage_perc{{{_MODEL}}})", "{{pod}}")],
            ),
            (
                "Restarts of processes",
                "In a pod, in the last hour. The pod stays; requests that were open got an error.",
                "short",
                [
                    (
                        f"sum by (pod, process) (increase(quire_process_restarts_total{{{_PODS}}}[1h]))",
                        "{{pod}} {{process}}",
                    )
                ],
            ),
            (
                "Failed requests on the server",
                "As Triton Inference Server counts them, by reason.",
                "reqps",
                [(_rate("nv_inference_request_failure", _PODS, "reason"), "{{reason}}")],
            ),
        ),
    ),
    (
        "Operator",
        (
            (
                "Passes over services",
                "By result. Many errors for long: see the operator's log.",
                "ops",
                [(_rate("quire_operator_reconcile_total", _ANY, "result"), "{{result}}")],
            ),
            (
                "Time of a pass",
                "From its turn to its last write.",
                "s",
                _quantiles("quire_operator_reconcile_seconds", _ANY),
            ),
            (
                "Waiting services",
                "Whose turn has come, and for how long the oldest of them waits.",
                "short",
                [
                    (f"sum(quire_operator_queue_depth{{{_ANY}}})", "waiting"),
                    (f"max(quire_operator_queue_age_seconds{{{_ANY}}})", "oldest, s"),
                    (f"sum(quire_operator_services{{{_ANY}}})", "LLMServices"),
                ],
            ),
            (
                "Writes to the API server",
                "By kind. None while nothing changes.",
                "ops",
                [(_rate("quire_operator_writes_total", _ANY, "kind, verb"), "{{kind}} {{verb}}")],
            ),
            (
                "Visits to pods",
                "By outcome.",
                "ops",
                [(_rate("quire_operator_pod_visits_total", _ANY, "outcome"), "{{outcome}}")],
            ),
            (
                "Silence of watches",
                "Since the API server last said something; minutes at most, or the operator is restarted.",
                "s",
                [(f"max by (kind) (quire_operator_watch_age_seconds{{{_ANY}}})", "{{kind}}")],
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The whole of it, as Grafana imports it."""
    return {
        "title": "Quire",
        "uid": "quire",
        "tags": ["quire", "llm"],
        "description": "LLMServices: traffic, latency, adapters, engine; and the operator.",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def text() -> str:
    """As it is stored: one line for each query and panel, so that a difference can be read."""
    whole = dashboard()
    panels = ",\n".join(json.dumps(panel) for panel in whole.pop("panels"))
    head = json.dumps(whole, indent=2).removesuffix("\n}")
    return f'{head},\n  "panels": [\n{panels}\n  ]\n}}\n'


def _variables() -> list[dict[str, Any]]:
    chosen = {"datasource": _DATASOURCE, "type": "query", "refresh": 2, "includeAll": True, "multi": True, "sort": 1}
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        *(
            {
                **chosen,
                "name": name,
                "label": label,
                "query": query,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
            }
            for name, label, query in (
                ("namespace", "Namespace", "label_values(quire_ready, namespace)"),
                ("model", "Model", 'label_values(vllm:num_requests_running{namespace=~"$namespace"}, model_name)'),
                (
                    "pod",
                    "Pod",
                    'label_values(vllm:num_requests_running{namespace=~"$namespace",model_name=~"$model"}, pod)',
                ),
            )
        ),
    ]


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS:
        made.append(
            {
                "type": "row",
                "id": len(made) + 1,
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for i, panel in enumerate(panels):
            made.append(_panel(len(made) + 1, panel, {"x": i % 3 * 8, "y": y + i // 3 * 8, "w": 8, "h": 8}))
        y += -(-len(panels) // 3) * 8
    return made


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    title, about, unit, queries = panel
    return {
        "type": "timeseries",
        "id": number,
        "title": title,
        "description": about,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _DATASOURCE, "expr": expression, "legendFormat": legend}
            for i, (expression, legend) in enumerate(queries)
        ],
    }
