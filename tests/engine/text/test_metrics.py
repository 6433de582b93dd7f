# SPDX-License-Identifier: Apache-2.0
"""Metrics have the names and labels that vLLM's dashboards read, and a bounded number of series."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire_engine.requests.request_state import RequestSummary
from quire_engine.text.adapter_labels import MAX_ADAPTER_LABELS, AdapterLabels
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.result_coalescer import coalesce
from quire_spec.constants import AdapterDigest
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import AdapterEvent, AdapterResidency, SchedulerStats, SequenceDelta


@pytest.fixture
def metrics() -> RequestMetrics:
    """Of a process that is connected to its core."""
    metrics = RequestMetrics(EngineConfig("m", enable_lora=True, max_loras=4), "base", 4096)
    metrics.set_core_connected(True)
    return metrics


def samples(metrics: RequestMetrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    samples_by_name: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(metrics.render()):
        for sample in family.samples:
            samples_by_name.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples_by_name


def value(metrics: RequestMetrics, name: str, **labels: str) -> float:
    matching = [v for sample_labels, v in samples(metrics)[name] if labels.items() <= sample_labels.items()]
    assert len(matching) == 1, (name, labels, matching)
    return matching[0]


VALUES: list[tuple[str, dict[str, str], float]] = [
    ("vllm:num_requests_running", {}, 1),
    ("vllm:num_requests_waiting", {}, 2),
    ("vllm:num_requests_swapped", {}, 1),
    ("vllm:kv_cache_usage_perc", {}, 0.25),
    ("vllm:cpu_cache_usage_perc", {}, 0.25),
    ("vllm:kv_offload_cpu_cache_usage_perc", {}, 0.5),
    ("vllm:kv_offload_store_bytes_total", {}, 700),
    ("vllm:kv_offload_load_bytes_total", {}, 300),
    ("vllm:external_prefix_cache_queries_total", {}, 90),
    ("vllm:external_prefix_cache_hits_total", {}, 40),
    ("quire_kv_folder_read_blocks_total", {}, 11),
    ("quire_kv_folder_written_blocks_total", {}, 12),
    ("quire_kv_folder_errors_total", {"reason": "corrupt"}, 2),
    ("vllm:prefix_cache_queries_total", {}, 7),
    ("vllm:prefix_cache_hits_total", {}, 0),
    ("vllm:num_preemptions_total", {}, 0),
    ("vllm:prompt_tokens_total", {}, 7),
    ("vllm:generation_tokens_total", {}, 3),
    ("vllm:request_success_total", {"finished_reason": "length"}, 1),
    ("vllm:time_to_first_token_seconds_bucket", {"le": "0.04"}, 1),
    ("vllm:time_to_first_token_seconds_bucket", {"le": "0.02"}, 0),
    ("vllm:time_to_first_token_seconds_sum", {}, 0.03),
    ("vllm:time_to_first_token_seconds_count", {}, 1),
    ("vllm:inter_token_latency_seconds_bucket", {"le": "+Inf"}, 1),
    ("vllm:e2e_request_latency_seconds_bucket", {"le": "+Inf"}, 1),
    ("vllm:e2e_request_latency_seconds_sum", {}, 1.5),
    ("vllm:request_queue_time_seconds_bucket", {"le": "+Inf"}, 1),
    ("vllm:request_prompt_tokens_bucket", {"le": "+Inf"}, 1),
    ("vllm:request_generation_tokens_bucket", {"le": "2.0"}, 0),
    ("vllm:request_generation_tokens_bucket", {"le": "5.0"}, 1),
    ("vllm:request_max_num_generation_tokens_sum", {}, 2),
    ("vllm:request_prefill_time_seconds_sum", {}, 0.5),
    ("vllm:request_decode_time_seconds_sum", {}, 0.25),
    ("vllm:request_inference_time_seconds_sum", {}, 0.75),
    ("vllm:request_time_per_output_token_seconds_sum", {}, 0.25),
    ("vllm:iteration_tokens_total_count", {}, 1),
    ("vllm:iteration_tokens_total_sum", {}, 9),
    ("vllm:lora_adapter_loaded", {"adapter_name": "sql", "level": "gpu", "pinned": "true", "rank": "8"}, 1),
    ("vllm:num_gpu_loaded_lora_adapters", {}, 1),
    ("vllm:num_cpu_loaded_lora_adapters", {}, 1),
    ("vllm:max_gpu_lora_adapters", {}, 4),
    ("vllm:lora_adapter_load_seconds_count", {"level": "gpu"}, 1),
    ("vllm:request_params_n_bucket", {"le": "2.0"}, 0),
    ("vllm:request_params_n_bucket", {"le": "5.0"}, 1),
    ("vllm:request_params_n_sum", {}, 3),
    ("vllm:request_params_max_tokens_bucket", {"le": "+Inf"}, 1),
    ("vllm:request_params_max_tokens_sum", {}, 40),
    ("vllm:cache_config_info", {"num_gpu_blocks": "100", "block_size": "16"}, 1),
    ("quire_states", {}, 40),
    ("quire_states_used", {}, 1),
    ("quire_state_snapshots", {}, 3),
    ("quire_host_states", {}, 9),
    ("quire_host_states_stored_total", {}, 21),
    ("quire_host_states_loaded_total", {}, 22),
    ("quire_kv_folder_read_states_total", {}, 23),
    ("quire_kv_folder_written_states_total", {}, 24),
    ("quire_kv_transfer_read_states_total", {}, 25),
    ("quire_swapped_out_blocks_total", {}, 5),
    ("quire_swapped_in_blocks_total", {}, 3),
    ("quire_block_copies_total", {}, 6),
    ("quire_adapter_requests_total", {"adapter": "sql"}, 1),
    ("quire_adapter_tokens_total", {"adapter": "sql"}, 3),
    ("quire_adapter_spec_decode_num_drafts_total", {"adapter": "sql"}, 2),
    ("quire_adapter_spec_decode_num_draft_tokens_total", {"adapter": "sql"}, 5),
    ("quire_adapter_spec_decode_num_accepted_tokens_total", {"adapter": "sql"}, 3),
    ("quire_adapter_time_to_first_token_seconds_count", {"adapter": "sql"}, 1),
    ("quire_adapter_slot_residency", {"adapter": "sql"}, 1),
    ("quire_requests_refused_total", {"code": "UNAVAILABLE"}, 1),
    ("vllm:request_failure_total", {"reason": "UNAVAILABLE"}, 1),
    ("quire_steps_total", {}, 3),
    ("vllm:spec_decode_num_drafts_total", {}, 4),
    ("vllm:spec_decode_num_draft_tokens_total", {}, 8),
    ("vllm:spec_decode_num_accepted_tokens_total", {}, 5),
    ("vllm:spec_decode_num_accepted_tokens_per_pos_total", {"position": "1"}, 2),
]
"""After one request. The names that start with "vllm:" are those in the output of `curl /metrics` of a vLLM server."""


def test_names_and_values_after_one_request(metrics: RequestMetrics):
    metrics.set_core_connected(True)
    metrics.adapter_metrics.set_adapters({"sql": "sha256:1"})
    metrics.adapter_metrics.record_admitted("sql")
    metrics.record_prompt_tokens(7)
    metrics.record_started("sql", 0.2)
    metrics.record_first_token("sql", 0.03)
    metrics.record_generated_tokens("sql", 1)
    metrics.record_next_token(0.02)
    metrics.record_generated_tokens("sql", 2)
    delta = SequenceDelta(1, [1], num_drafts=1, num_draft_tokens=2, num_accepted_draft_tokens=1)
    other = SequenceDelta(1, [1], num_drafts=1, num_draft_tokens=3, num_accepted_draft_tokens=2)
    metrics.adapter_metrics.record_drafts("sql", coalesce([delta, other]))
    blocks = {"num_blocks": 100, "num_used_blocks": 25, "num_host_blocks": 8, "num_used_host_blocks": 2}
    copied = {"num_swapped_out_blocks": 5, "num_swapped_in_blocks": 3, "num_block_copies": 6}
    copied |= {"num_cached_host_blocks": 4, "kv_offload_store_bytes": 700, "kv_offload_load_bytes": 300}
    copied |= {"host_cache_queries": 90, "host_cache_hits": 40}
    copied |= {"num_folder_read_blocks": 11, "num_folder_written_blocks": 12, "folder_errors": {"corrupt": 2}}
    drafts = {"num_drafts": 4, "num_draft_tokens": 8, "num_accepted_draft_tokens": 5}
    drafts["accepted_draft_tokens_per_position"] = [3, 2]
    sequences = {"num_running": 1, "num_waiting": 2, "num_swapped": 1}
    sequences |= {"num_states": 40, "num_used_states": 1, "num_state_snapshots": 3, "num_host_states": 9}
    copied |= {"num_stored_host_states": 21, "num_loaded_host_states": 22}
    copied |= {"num_folder_read_states": 23, "num_folder_written_states": 24}
    copied["num_peer_read_states"] = 25
    metrics.record_core_stats(
        SchedulerStats(
            **blocks, **copied, **sequences, prefix_cache_queries=7, num_steps=3, num_step_tokens=9, **drafts
        )
    )
    metrics.adapter_metrics.residency.record([AdapterResidency("sha256:1", "slot", True, 8)])
    metrics.adapter_metrics.record_adapter_event(AdapterEvent("slot", "sha256:1", 0.01))
    params = SamplingParams(n=3, max_tokens=40)
    metrics.record_finished("length", RequestSummary(params, 7, 3, 2, 1.5, prefill_s=0.5, decode_s=0.25))
    metrics.record_rejected("UNAVAILABLE")
    assert [(name, labels, value(metrics, name, **labels)) for name, labels, _ in VALUES] == VALUES
    samples_by_name = samples(metrics)
    assert all(name.startswith(("vllm:", "quire_")) for name in samples_by_name)
    for name, _, _ in VALUES:
        assert not name.startswith("vllm:") or all(
            labels["model_name"] == "base" for labels, _ in samples_by_name[name]
        )
    for family in text_string_to_metric_families(metrics.render()):
        assert family.documentation.endswith("."), family.name


def test_all_names_that_the_dashboards_of_vllm_read_exist(metrics: RequestMetrics):
    # A counter of finished requests exists with the first of its reason.
    metrics.record_finished("stop", RequestSummary(SamplingParams(), 1, 1, 1, 1.0, prefill_s=1.0, decode_s=0.0))
    boards = json.loads(Path(__file__).with_name("vllm_dashboards.json").read_text())
    assert len(boards) == 3
    missing = {(board["board"], name) for board in boards for name in board["names"] if name not in samples(metrics)}
    assert not missing


def test_names_and_labels_of_vllm_backend(metrics: RequestMetrics):
    metrics.record_next_token(0.02)
    metrics.record_first_token(None, 0.03)
    metrics.record_rejected("UNAVAILABLE")
    samples_by_name: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(metrics.render_vllm_backend()):
        for sample in family.samples:
            assert sample.name.startswith("vllm:") and sample.labels["version"] == "1"
            assert "model_name" not in sample.labels
            samples_by_name.setdefault(sample.name, {})[sample.labels.get("model", "")] = sample.value
    assert samples_by_name["vllm:time_per_output_token_seconds_sum"] == {"base": 0.02}
    assert samples_by_name["vllm:time_to_first_token_seconds_count"] == {"base": 1}
    assert samples_by_name["vllm:request_failure_total"] == {"base": 1}
    assert "vllm:inter_token_latency_seconds_sum" not in samples_by_name


def test_failed_requests_do_not_count_as_latency(metrics: RequestMetrics):
    summary = RequestSummary(SamplingParams(), 7, 0, 0, 9.0, prefill_s=0.0, decode_s=0.0)
    metrics.record_finished("error", summary)
    metrics.record_finished("abort", summary)
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 0
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1


def test_lora_requests_info_is_one_series_with_joined_names(metrics: RequestMetrics):
    metrics.set_active_adapters(running=["b", "a"], waiting=[])
    metrics.set_active_adapters(running=["a"], waiting=["c", "b"])
    ((labels, at),) = samples(metrics)["vllm:lora_requests_info"]
    assert labels == {"max_lora": "4", "running_lora_adapters": "a", "waiting_lora_adapters": "b,c"}
    assert abs(at - time.time()) < 60


def test_counters_continue_when_the_core_restarts(metrics: RequestMetrics):
    metrics.set_core_connected(True)
    metrics.record_core_stats(SchedulerStats(num_preemptions=5, num_blocks=10))
    metrics.record_core_stats(SchedulerStats(num_preemptions=6, num_blocks=10))
    metrics.set_core_connected(False)
    assert value(metrics, "quire_core_connected") == 0
    metrics.set_core_connected(True)
    metrics.record_core_stats(SchedulerStats(num_preemptions=2, num_blocks=20))
    assert value(metrics, "vllm:num_preemptions_total") == 8
    assert value(metrics, "vllm:cache_config_info") == 1


def names(count: int) -> Iterator[str]:
    return (f"adapter-{i}" for i in range(count))


def test_adapters_beyond_the_limit_share_a_label(metrics: RequestMetrics):
    adapter_names = list(names(MAX_ADAPTER_LABELS + 50))
    metrics.adapter_metrics.set_adapters({name: name for name in adapter_names})
    for name in adapter_names:
        metrics.adapter_metrics.record_admitted(name)
        metrics.adapter_metrics.residency.record([AdapterResidency(AdapterDigest(name), "slot")])
    requests = samples(metrics)["quire_adapter_requests_total"]
    assert len(requests) == MAX_ADAPTER_LABELS + 1
    assert value(metrics, "quire_adapter_requests_total", adapter="_other") == 50
    assert len(samples(metrics)["quire_adapter_slot_residency"]) == MAX_ADAPTER_LABELS
    start = time.process_time()
    metrics.render()
    assert time.process_time() - start < 2.0


def test_removed_adapters_free_labels_for_others(metrics: RequestMetrics):
    labels = AdapterLabels()
    adapter_names = list(names(MAX_ADAPTER_LABELS + 1))
    assert labels.set_names(adapter_names) == set()
    assert [labels.label(name) for name in adapter_names] == [*adapter_names[:-1], "_other"]
    assert labels.set_names(adapter_names[1:]) == {adapter_names[0]}
    assert labels.label(adapter_names[-1]) == adapter_names[-1]
    assert labels.label(adapter_names[0]) == "_other"

    metrics.adapter_metrics.set_adapters({"a": "1", "b": "2"})
    metrics.record_generated_tokens("a", 1)
    metrics.record_generated_tokens("b", 1)
    metrics.adapter_metrics.set_adapters({"b": "2"})
    metrics.record_generated_tokens("a", 4)
    tokens = samples(metrics)["quire_adapter_tokens_total"]
    assert {labels["adapter"]: v for labels, v in tokens} == {"b": 1, "_other": 4}


def test_adapter_event_is_counted_for_each_name_once_the_adapter_has_one(metrics: RequestMetrics):
    adapter_metrics = metrics.adapter_metrics
    adapter_metrics.record_adapter_event(AdapterEvent("host", "sha256:1", 0.01))
    adapter_metrics.set_adapters({"a": "sha256:1", "also-a": "sha256:1"})
    adapter_metrics.set_adapters({"a": "sha256:1"})
    adapter_metrics.record_adapter_event(AdapterEvent("evicted", "sha256:1"))
    assert value(metrics, "quire_adapter_load_seconds_count", adapter="a", to="host") == 1
    assert value(metrics, "quire_adapter_evictions_total", adapter="a") == 1


def test_pod_without_a_core_looks_full() -> None:
    """Endpoint pickers send requests to the pod that looks idle, or has room for the adapter."""
    metrics = RequestMetrics(EngineConfig("m", enable_lora=True, max_loras=4), "base", 4096)

    def expect(waiting: int, usage: float, max_lora: str) -> None:
        metrics.set_active_adapters(running=[], waiting=[])
        assert value(metrics, "vllm:num_requests_waiting") == waiting
        assert value(metrics, "vllm:kv_cache_usage_perc") == usage
        ((labels, _),) = samples(metrics)["vllm:lora_requests_info"]
        assert labels["max_lora"] == max_lora

    full, idle = (64, 1, "0"), (0, 0, "4")
    expect(*full)
    for connected in (True, False, True):
        metrics.set_core_connected(connected)
        expect(*(idle if connected else full))
    metrics.record_core_stats(SchedulerStats(num_running=2, num_waiting=1, num_blocks=4, num_used_blocks=1))
    metrics.set_core_connected(False)
    expect(*full)


def test_series_of_an_adapter_exist_before_its_first_request(metrics: RequestMetrics) -> None:
    metrics.adapter_metrics.set_adapters({"sql": "sha256:1"})
    for name in ("requests_total", "tokens_total", "time_to_first_token_seconds_count", "requests_limited_total"):
        assert value(metrics, f"quire_adapter_{name}", adapter="sql") == 0
    metrics.adapter_metrics.set_adapters({f"a{i}": f"sha256:{i}" for i in range(MAX_ADAPTER_LABELS + 1)})
    assert "quire_adapter_requests_total" not in samples(metrics)
