# SPDX-License-Identifier: Apache-2.0
"""Options of `vllm serve` that `quire serve MODEL` has not, each with what to do instead.

vllm_arguments.py has the arguments of vLLM's engine, which LLM also reads. This module adds the options of its server,
and arguments of the engine that an LLMService expresses in another way. Called by options.py.
"""

from collections.abc import Mapping

from quire_spec.engine.vllm_arguments import OTHER_VLLM_ARGUMENTS, fix_of

_WITHOUT_EFFECT = (
    "headless", "grpc", "uds", "uvicorn-log-level", "disable-uvicorn-access-log",
    "disable-access-log-for-endpoints", "response-role", "enable-ssl-refresh",
    "disable-frontend-multiprocessing", "enable-request-id-headers", "disable-fastapi-docs",
    "enable-prompt-tokens-details", "enable-server-load-tracking", "enable-force-include-usage",
    "enable-log-outputs", "log-config-file", "log-error-stack", "h11-max-incomplete-event-size",
    "h11-max-header-count", "enable-chunked-prefill", "no-enable-chunked-prefill", "prefix-caching-hash-algo",
    "all2all-backend", "enable-dbo", "enable-eplb", "eplb-config", "num-redundant-experts",
    "expert-placement-strategy", "mm-processor-cache-gb", "mm-processor-cache-type",
    "mm-shm-cache-max-object-size-mb", "mm-encoder-tp-mode", "skip-mm-profiling", "async-scheduling",
    "no-async-scheduling", "optimization-level", "cudagraph-capture-sizes", "max-cudagraph-capture-size",
    "attention-backend", "attention-config", "kernel-config", "profiler-config",
    "show-hidden-metrics-for-version", "kv-sharing-fast-prefill", "disable-hybrid-kv-cache-manager",
    "disable-chunked-mm-input", "safetensors-load-strategy", "pt-load-map-location", "worker-extension-cls",
    "enable-layerwise-nvtx-tracing", "kv-cache-metrics", "enable-mfu-metrics", "mamba-block-size",
    "mamba-cache-mode", "mamba-cache-dtype", "interleave-mm-strings", "specialize-active-lora",
)  # fmt: skip
"""Options that affect only how vLLM computes, logs or starts."""
_IN_FILE = "write a file with --save, set {} in it, and serve the file with -f"
_GPUS = "set spec.engine.dataParallelSize or spec.replicas in a file, or use --data-parallel-size"
_TOOLS = "the parser of the checkpoint's format is always used; remove it, or choose another with --tool-call-parser"
_SPEC_FIELDS = {
    "scheduling-policy": "engine.schedulingPolicy",
    "max-logprobs": "engine.maxLogprobs",
    "swap-space": "engine.swapSpace",
    "kv-cache-memory-bytes": "engine.kvCacheMemory",
    "skip-tokenizer-init": "engine.skipTokenizerInit",
    "kv-events-config": "networking.kvEvents",
    "enable-prefix-caching": "engine.prefixCaching (default: true)",
    "no-enable-prefix-caching": "engine.prefixCaching to false",
    "generation-config": "openai.generationConfig",
    "chat-template-content-format": "openai.chatTemplate",
    "allowed-origins": "openai.corsAllowedOrigins",
}
"""Options whose value is a field of the spec that has no option."""
_FIXES = {
    **dict.fromkeys(_WITHOUT_EFFECT, "it would have no effect; remove it"),
    **dict.fromkeys(
        (
            "data-parallel-rank",
            "data-parallel-start-rank",
            "data-parallel-size-local",
            "data-parallel-address",
            "data-parallel-rpc-port",
            "data-parallel-backend",
            "data-parallel-hybrid-lb",
            "data-parallel-external-lb",
        ),
        _GPUS,
    ),
    **dict.fromkeys(
        (
            "enable-auto-tool-choice",
            "exclude-tools-when-tool-choice-none",
            "tool-parser-plugin",
            "reasoning-parser-plugin",
        ),
        _TOOLS,
    ),
    **dict.fromkeys(
        (
            "allow-credentials",
            "allowed-methods",
            "allowed-headers",
            "root-path",
            "middleware",
            "ssl-ca-certs",
            "ssl-cert-reqs",
        ),
        "put a reverse proxy in front of the OpenAI port",
    ),
    "config": "write a file with --save, and serve it with -f",
    "trust-request-chat-template": "a request cannot bring a template; use --chat-template",
    "return-tokens-as-token-ids": "set return_tokens_as_token_ids or return_token_ids in requests",
    "tool-server": "the client calls the tools; remove it",
    "tokens-only": _IN_FILE.format("spec.engine.skipTokenizerInit"),
    "enable-tokenizer-info-endpoint": "read tokenizer_config.json of the checkpoint",
    "ssl-keyfile": "use --openai-ssl-keyfile",
    "ssl-certfile": "use --openai-ssl-certfile",
    "api-server-count": "use --openai-api-server-count",
    "allowed-local-media-path": "send images in requests, or use --allowed-media-domain",
    "allowed-media-domains": "use --allowed-media-domain",
    "media-io-kwargs": "remove it; the checkpoint's own settings are used",
    "mm-processor-kwargs": "remove it; the checkpoint's own settings are used",
    "structured-outputs-config": "set response_format or structured_outputs in requests",
    "logprobs-mode": "log probabilities are those of the model before sampling parameters; remove it",
    "prefill-context-parallel-size": "use --tensor-parallel-size",
    "io-processor-plugin": "code of plugins is not executed; remove it",
    "pooler-config": "use --pooling-type",
    "ignore-patterns": "only the safetensors files of a checkpoint are read; remove it",
    "additional-config": "remove it",
    "weight-transfer-config": "load adapters through the API, or change the model in the file",
    "ec-transfer-config": "remove it",
    **{option: _IN_FILE.format(f"spec.{path}") for option, path in _SPEC_FIELDS.items()},
}
OTHER_VLLM_OPTIONS: Mapping[str, str] = {
    **{f"--{name.replace('_', '-')}": fix_of(name) for name in sorted(OTHER_VLLM_ARGUMENTS - {"served_model_name"})},
    **{f"--{name}": fix for name, fix in _FIXES.items()},
}
"""Maps each option to what to do instead."""
