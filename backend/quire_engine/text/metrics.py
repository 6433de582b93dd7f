# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the text process.

If a metric has the same meaning as a metric of vLLM, it also has the same name. Therefore, dashboards, autoscalers and
endpoint pickers that were written for vLLM can also be used with Quire. All other names begin with quire_. The metrics
are counted in this process, because the engine core has no information about requests, model names and latencies. The
core sends its own counters with every step (SchedulerStats). The request manager calls this module at most once per
request and step.
"""

import time
from collections.abc import Iterable
from functools import partial

from quire_engine.requests.request_state import RequestSummary
from quire_engine.text.adapter_labels import OTHER_LABEL
from quire_engine.text.adapter_metrics import AdapterMetrics
from quire_engine.text.metric_series import CounterSeries, GaugeSeries, HistogramSeries, Registry
from quire_spec.constants import AdapterName
from quire_spec.engine.config import EngineConfig
from quire_spec.protocol.messages import PrefillResult, SchedulerStats

# These are the buckets of vLLM, so that its dashboards show comparable quantiles.
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_N_BUCKETS = (1, 2, 5, 10, 20)
_STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUEST_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

_LIVE_CORE_COUNTERS = ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions")
"""Counters of the core that the live page shows."""

MAX_API_KEY_LABELS = 100
"""Number of API keys that have their own series; all other keys share one series."""

_KV_CACHE_INFO_LABELS = (
    *("model_name", "block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks"),
)


class RequestMetrics:
    """The registry of this process. All methods are cheap."""

    def __init__(self, config: EngineConfig, served_name: str, max_model_len: int) -> None:
        self.registry = Registry()
        self._model_name = served_name
        self._config = config
        self._last_stats = SchedulerStats()
        self.adapter_metrics = AdapterMetrics(self.registry, served_name, _TTFT_BUCKETS)
        self._create_gauges()
        self._create_counters()
        self._create_histograms(_token_buckets(max_model_len))
        self.set_core_connected(False)

    def set_active_adapters(self, running: Iterable[str], waiting: Iterable[str]) -> None:
        """Set the names of the adapters in use: those in slots or of running requests, and those of waiting
        requests."""
        if not self._config.enable_lora:
            return
        # Only one series is kept. Readers use only the newest one, and the series of old combinations of names would
        # never disappear by themselves.
        self._lora_requests_info.clear()
        # The names are those of all cores, and each core has its own slots.
        num_slots = self._config.max_loras * self._config.data_parallel_size
        max_lora = num_slots if self._core_connected.value else 0
        labels = (str(max_lora), ",".join(sorted(waiting)), ",".join(sorted(running)))
        self._lora_requests_info.labels(*labels).set(time.time())

    def record_rejected(self, code: str) -> None:
        """Count a request that was not admitted."""
        self._rejected_requests.labels(self._model_name, code).inc()
        self.record_failed(code)

    def record_ignored_fields(self) -> None:
        """Count a request with fields that the server does not know."""
        self._requests_with_ignored_fields.inc()

    def record_prefill(self, result: PrefillResult) -> None:
        """Count a request whose header names a pod for its prompt."""
        self._prefills.labels(self._model_name, result).inc()

    def record_failed(self, code: str) -> None:
        """Count a request that ended with an error, whether it was admitted or not."""
        self._failed_requests.labels(self._model_name, code).inc()

    def record_started(self, adapter_name: AdapterName | None, queued_s: float) -> None:
        """Record that a step ran a request for the first time, `queued_s` after its arrival."""
        self._queue_time.observe(queued_s)
        self.adapter_metrics.record_started(adapter_name, queued_s)

    def record_first_token(self, adapter_name: AdapterName | None, seconds: float) -> None:
        """Record the first token of a request, `seconds` after its arrival."""
        self._time_to_first_token.observe(seconds)
        self.adapter_metrics.record_first_token(adapter_name, seconds)

    def record_next_token(self, seconds: float) -> None:
        """Record another token of a request, `seconds` after the previous one."""
        self._inter_token_latency.observe(seconds)

    def record_generated_tokens(self, adapter_name: AdapterName | None, num_tokens: int) -> None:
        """Count generated tokens."""
        self._generation_tokens.inc(num_tokens)
        self.adapter_metrics.record_generated_tokens(adapter_name, num_tokens)

    def record_finished(self, reason: str, request: RequestSummary) -> None:
        """Record the end of an admitted request (stop, length, abort or error)."""
        self._finished_requests.labels(self._model_name, reason).inc()
        if reason in ("stop", "length"):
            self._e2e_latency.observe(request.latency_s)
            self._prefill_time.observe(request.prefill_s)
            self._decode_time.observe(request.decode_s)
            self._inference_time.observe(request.prefill_s + request.decode_s)
            self._time_per_output_token.observe(request.decode_s / max(1, request.max_output_tokens - 1))
            self._request_prompt_tokens.observe(request.num_input_tokens)
            self._request_generation_tokens.observe(request.num_output_tokens)
            self._request_max_generation_tokens.observe(request.max_output_tokens)
            self._params_n.observe(request.params.n)
            if request.params.max_tokens is not None:
                self._params_max_tokens.observe(request.params.max_tokens)

    def record_prompt_tokens(self, num_tokens: int, api_key_name: str = "") -> None:
        """Count the tokens of a prompt that was sent to the engine core."""
        self._prompt_tokens.inc(num_tokens)
        if api_key_name:
            label = self._api_key_label(api_key_name)
            self._api_key_requests.labels(self._model_name, label).inc()
            self._api_key_tokens.labels(self._model_name, label, "prompt").inc(num_tokens)

    def record_api_key_output(self, api_key_name: str, num_tokens: int) -> None:
        """Add the output tokens of an ended request to the count of its API key."""
        if api_key_name:
            label = self._api_key_label(api_key_name)
            self._api_key_tokens.labels(self._model_name, label, "completion").inc(num_tokens)

    def record_api_key_limited(self, api_key_name: str) -> None:
        """Count a request that was rejected because of a limit of its API key."""
        self._api_key_limited.labels(self._model_name, self._api_key_label(api_key_name)).inc()

    def _api_key_label(self, name: str) -> str:
        """Return the label of an API key; the first MAX_API_KEY_LABELS keys have labels of their own."""
        if name not in self._api_key_labels and len(self._api_key_labels) >= MAX_API_KEY_LABELS:
            return OTHER_LABEL
        self._api_key_labels.add(name)
        return name

    def record_slow_reader(self) -> None:
        """Count a frontend connection that was closed because the frontend did not read."""
        self._slow_readers.inc()

    def set_core_connected(self, connected: bool) -> None:
        """Record that the engine core connected or disconnected. The counters of a new core start at zero.

        Without a core, the KV cache is shown as full, a whole batch as waiting, and `max_lora` as 0. Endpoint pickers
        do not read quire_core_connected, and would prefer a pod that looks idle or has room for another adapter.
        """
        self._core_connected.set(connected)
        self._last_stats = SchedulerStats()
        for gauge in (
            self._swap_space_usage,
            self._offload_usage,
            self._host_adapters,
            self._host_adapter_bytes,
            self._num_swapped,
            self._leased_rows,
            *self._states.values(),
        ):
            gauge.set(0)
        self._num_running.set(0)
        self._num_waiting.set(0 if connected else self._config.max_num_seqs)
        self._kv_cache_usage.set(0 if connected else 1)
        self.adapter_metrics.residency.clear()
        num_slots = self._config.max_loras * self._config.data_parallel_size if self._config.enable_lora else 0
        self._max_slots.set(num_slots if connected else 0)

    def record_core_stats(self, stats: SchedulerStats) -> None:
        """Update gauges and counters from the statistics of a step."""
        previous, self._last_stats = self._last_stats, stats
        if stats.num_blocks != previous.num_blocks:
            self._set_kv_cache_info(stats.num_blocks)
        self._num_running.set(stats.num_running)
        self._num_waiting.set(stats.num_waiting)
        self._num_swapped.set(stats.num_swapped)
        self._swap_space_usage.set(stats.num_used_host_blocks / stats.num_host_blocks if stats.num_host_blocks else 0.0)
        self._offload_usage.set(stats.num_cached_host_blocks / stats.num_host_blocks if stats.num_host_blocks else 0.0)
        self._host_adapters.set(stats.num_host_adapters)
        self._host_adapter_bytes.set(stats.host_adapter_bytes)
        if (num_tokens := stats.num_step_tokens - previous.num_step_tokens) > 0:
            self._step_tokens.observe(num_tokens)
        self._kv_cache_usage.set(stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0)
        for name, gauge in self._states.items():
            gauge.set(getattr(stats, name))
        self._leased_rows.set(stats.num_leased_rows)
        for name, counter in self._core_counters.items():
            counter.inc(max(0, getattr(stats, name) - getattr(previous, name)))
        for errors, numbers, previous_numbers in (
            (self._folder_errors, stats.folder_errors, previous.folder_errors),
            (self._peer_errors, stats.peer_errors, previous.peer_errors),
        ):
            for reason, number in numbers.items():
                increase = max(0, number - previous_numbers.get(reason, 0))
                errors.labels(self._model_name, reason).inc(increase)
        accepted = stats.accepted_draft_tokens_per_position
        previously_accepted = previous.accepted_draft_tokens_per_position or [0] * len(accepted)
        for position, (new, old) in enumerate(zip(accepted, previously_accepted, strict=True)):
            self._accepted_tokens_per_position.labels(self._model_name, str(position)).inc(max(0, new - old))

    def live_counters(self) -> dict[str, float]:
        """Return the counters that the live page turns into rates and mean latencies. The call is cheap."""
        counters = {name: self._core_counters[name] for name in _LIVE_CORE_COUNTERS}
        counters |= {"prompt_tokens": self._prompt_tokens, "generation_tokens": self._generation_tokens}
        values = {f"{name}_total": counter.value for name, counter in counters.items()}
        ttft, itl = self._time_to_first_token, self._inter_token_latency
        for name, histogram in (("time_to_first_token_seconds", ttft), ("inter_token_latency_seconds", itl)):
            values |= {f"{name}_count": histogram.count, f"{name}_sum": histogram.sum}
        return values

    def render(self) -> str:
        """Return all metrics in the text format."""
        return self.registry.text()

    def render_vllm_backend(self) -> str:
        """Return the series whose names begin with `vllm:` in the form in which NVIDIA's vllm_backend exports them.

        In this form, they have the labels `model` and `version` instead of `model_name`, and one of them has its name
        from older vLLM releases.

        Source: src/utils/metrics.py of vllm_backend.
        """
        return self.registry.renamed_text("vllm:", _vllm_backend_names)

    def _gauge(self, name: str, documentation: str) -> GaugeSeries:
        return self.registry.gauge(name, documentation, ["model_name"]).labels(self._model_name)

    def _counter(self, name: str, documentation: str) -> CounterSeries:
        return self.registry.counter(name, documentation, ["model_name"]).labels(self._model_name)

    def _histogram(self, name: str, documentation: str, buckets: Iterable[float]) -> HistogramSeries:
        return self.registry.histogram(name, documentation, ["model_name"], buckets).labels(self._model_name)

    def _create_gauges(self) -> None:
        gauge = self._gauge
        self._num_running = gauge("vllm:num_requests_running", "Running requests.")
        self._num_waiting = gauge("vllm:num_requests_waiting", "Requests that wait to run.")
        self._num_swapped = gauge(
            "vllm:num_requests_swapped", "Requests that wait with their KV blocks swapped to host memory."
        )
        self._kv_cache_usage = gauge("vllm:kv_cache_usage_perc", "Fraction of KV blocks in use; 1 means all.")
        self._swap_space_usage = gauge("vllm:cpu_cache_usage_perc", "Fraction of the swap space in use; 1 means all.")
        self._offload_usage = gauge(
            "vllm:kv_offload_cpu_cache_usage_perc", "Fraction of the host memory for KV blocks that caches blocks."
        )
        self._states = {
            "num_states": gauge("quire_states", "States of sequences for which there is memory."),
            "num_used_states": gauge("quire_states_used", "States that running sequences have."),
            "num_state_snapshots": gauge("quire_state_snapshots", "States that the prefix cache keeps."),
            "num_host_states": gauge("quire_host_states", "States that host memory keeps for the prefix cache."),
        }
        self._leased_rows = gauge(
            "quire_kv_transfer_leased_blocks", "KV blocks in host memory that other pods have leased."
        )
        self._host_adapters = gauge("quire_host_adapters", "Adapters in host memory.")
        self._host_adapter_bytes = gauge("quire_host_adapter_bytes", "Bytes of the adapters in host memory.")
        self._core_connected = gauge("quire_core_connected", "1 while the engine core is connected.")
        self._max_slots = gauge(
            "vllm:max_gpu_lora_adapters", "Adapter slots; 0 while the engine core is not connected."
        )
        documentation = "Names of the adapters in slots and of waiting requests; the value is the time in Unix seconds."
        label_names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        self._lora_requests_info = self.registry.gauge("vllm:lora_requests_info", documentation, label_names)
        self._kv_cache_info = self.registry.gauge("vllm:cache_config_info", "The KV cache.", _KV_CACHE_INFO_LABELS)

    def _create_counters(self) -> None:
        counter = self._counter
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens sent to the engine.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self._slow_readers = counter(
            "quire_slow_readers", "Frontend connections that were closed because the frontend did not read."
        )
        self._core_counters = {
            "prefix_cache_queries": counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache."),
            "prefix_cache_hits": counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache."),
            "num_preemptions": counter("vllm:num_preemptions", "Preempted sequences."),
            "num_block_copies": counter("quire_block_copies", "KV blocks copied on write."),
            "num_swapped_out_blocks": counter("quire_swapped_out_blocks", "KV blocks copied to host memory."),
            "num_swapped_in_blocks": counter("quire_swapped_in_blocks", "KV blocks copied back from host memory."),
            "kv_offload_store_bytes": counter(
                "vllm:kv_offload_store_bytes", "Bytes of KV blocks copied to the cache in host memory, on each rank."
            ),
            "kv_offload_load_bytes": counter(
                "vllm:kv_offload_load_bytes", "Bytes of KV blocks used from the cache in host memory, on each rank."
            ),
            "host_cache_queries": counter(
                "vllm:external_prefix_cache_queries", "Prompt tokens looked up in host memory, after the KV cache."
            ),
            "host_cache_hits": counter("vllm:external_prefix_cache_hits", "Prompt tokens found in host memory."),
            "num_dropped_kv_events": counter(
                "quire_kv_events_dropped", "Batches of KV events that were dropped because their queue was full."
            ),
            "num_folder_read_blocks": counter("quire_kv_folder_read_blocks", "KV blocks read from the folder."),
            "num_folder_written_blocks": counter("quire_kv_folder_written_blocks", "KV blocks written to the folder."),
            "num_folder_read_states": counter("quire_kv_folder_read_states", "States read from the folder."),
            "num_folder_written_states": counter("quire_kv_folder_written_states", "States written to the folder."),
            "num_stored_host_states": counter("quire_host_states_stored", "States copied to host memory."),
            "num_loaded_host_states": counter(
                "quire_host_states_loaded", "States in host memory that requests continued from."
            ),
            "num_peer_requested_blocks": counter(
                "quire_kv_transfer_requested_blocks", "KV blocks requested from other pods."
            ),
            "num_peer_read_blocks": counter("quire_kv_transfer_read_blocks", "KV blocks read from other pods."),
            "num_peer_read_states": counter("quire_kv_transfer_read_states", "States read from other pods."),
            "num_refused_leases": counter(
                "quire_kv_transfer_refused_leases", "KV blocks not leased to other pods because the quota was full."
            ),
            "num_steps": counter("quire_steps", "Steps of the engine."),
            "num_drafts": counter("vllm:spec_decode_num_drafts", "Drafts that steps verified."),
            "num_draft_tokens": counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that steps verified."),
            "num_accepted_draft_tokens": counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens."),
        }
        self._folder_errors = self.registry.counter(
            "quire_kv_folder_errors",
            "KV blocks and states in the folder that were wrong or could not be read or written, by reason.",
            ["model_name", "reason"],
        )
        self._peer_errors = self.registry.counter(
            "quire_kv_transfer_errors",
            "Reads of KV blocks from other pods that failed, by reason.",
            ["model_name", "reason"],
        )
        self._accepted_tokens_per_position = self.registry.counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by position in the draft.",
            ["model_name", "position"],
        )
        self._api_key_labels: set[str] = set()
        label_names = ["model_name", "api_key"]
        documentation = "Requests sent to the engine, by API key; all keys after the first 100 share one series."
        self._api_key_requests = self.registry.counter("quire_api_key_requests", documentation, label_names)
        documentation = "Requests rejected because of a limit of the API key."
        self._api_key_limited = self.registry.counter("quire_api_key_requests_limited", documentation, label_names)
        label_names, documentation = [*label_names, "kind"], "Prompt and completion tokens, by API key."
        self._api_key_tokens = self.registry.counter("quire_api_key_tokens", documentation, label_names)
        label_names, documentation = ["model_name", "finished_reason"], "Requests that ended, by reason."
        self._finished_requests = self.registry.counter("vllm:request_success", documentation, label_names)
        label_names, documentation = ["model_name", "reason"], "Requests that ended with an error, admitted or not."
        self._failed_requests = self.registry.counter("vllm:request_failure", documentation, label_names)
        self._requests_with_ignored_fields = self._counter(
            "quire_requests_with_ignored_fields",
            "Requests of the OpenAI port with fields that the server does not know and ignored.",
        )
        self._prefills = self.registry.counter(
            "quire_remote_prefills",
            "Requests whose header names a pod for their prompt, by result.",
            ["model_name", "result"],
        )
        self._rejected_requests = self.registry.counter(
            "quire_requests_refused",
            "Requests not admitted, by code. Excludes requests that the server itself rejects: unknown models, wrong "
            "tensor types, invalid JSON.",
            ("model_name", "code"),
        )

    def _create_histograms(self, token_buckets: list[int]) -> None:
        self._time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT_BUCKETS
        )
        self._inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Between the tokens of two successive steps of a request.",
            _INTER_TOKEN_BUCKETS,
        )
        self._e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its last token.", _REQUEST_LATENCY_BUCKETS
        )
        self._queue_time = self._histogram(
            "vllm:request_queue_time_seconds",
            "From a request's arrival to the start of its first step.",
            _REQUEST_LATENCY_BUCKETS,
        )
        self._inference_time = self._histogram(
            "vllm:request_inference_time_seconds",
            "From the start of a request's first step to its last token.",
            _REQUEST_LATENCY_BUCKETS,
        )
        self._prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds",
            "From the start of a request's first step to its first token.",
            _REQUEST_LATENCY_BUCKETS,
        )
        self._decode_time = self._histogram(
            "vllm:request_decode_time_seconds",
            "From a request's first token to its last one.",
            _REQUEST_LATENCY_BUCKETS,
        )
        self._time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of a finished request.",
            _INTER_TOKEN_BUCKETS,
        )
        self._step_tokens = self._histogram(
            "vllm:iteration_tokens_total", "Prompt and output tokens of a step.", _STEP_TOKENS_BUCKETS
        )
        histogram = partial(self._histogram, buckets=token_buckets)
        self._request_max_generation_tokens = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest output of a finished request."
        )
        self._request_prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens of a finished request.")
        self._request_generation_tokens = histogram(
            "vllm:request_generation_tokens", "Output tokens of a finished request."
        )
        self._params_max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens of a finished request.")
        self._params_n = self._histogram("vllm:request_params_n", "Outputs (n) of a finished request.", _N_BUCKETS)

    def _set_kv_cache_info(self, num_blocks: int) -> None:
        config = self._config
        self._kv_cache_info.clear()
        self._kv_cache_info.labels(
            self._model_name,
            str(config.block_size),
            config.kv_cache_dtype,
            str(config.enable_prefix_caching),
            str(config.gpu_memory_utilization),
            str(num_blocks),
        ).set(1)


def _vllm_backend_names(name: str, labels: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return the name and the labels that vllm_backend uses. Each model has only version 1, as in the model
    repository."""
    name = name.replace("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
    renamed = {"model" if key == "model_name" else key: value for key, value in labels.items()}
    return name, renamed | {"version": "1"}


def _token_buckets(max_model_len: int) -> list[int]:
    """Return the buckets 1, 2, 5, 10, 20, 50, ... up to max_model_len, as vLLM does."""
    buckets = [m * 10**e for e in range(len(str(max_model_len))) for m in (1, 2, 5)]
    return [bucket for bucket in buckets if bucket <= max_model_len] or [1]
