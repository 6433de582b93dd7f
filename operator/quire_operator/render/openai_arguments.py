# SPDX-License-Identifier: Apache-2.0
"""Converts spec.openai to options of `python -m quire_server`, and returns the path of the chat template.

Called by pod_template.py, objects.py and cli/serve.py, so that a cluster and `quire serve` use the same options.
"""

from collections.abc import Iterator

from quire_operator.api.llmservice import LLMService
from quire_operator.api.quantity import to_bytes
from quire_operator.render import object_names

TLS_FILES = {"certfile": "tls.crt", "keyfile": "tls.key"}
"""Maps the last part of an option's name to the name of the file in a Secret of type kubernetes.io/tls."""


def openai_arguments(
    service: LLMService, port: int | None, api_keys_dir: str | None, tls_dir: str | None
) -> Iterator[str]:
    """Yield the options. If `port` is None, the OpenAI API is turned off.

    `api_keys_dir` is the folder in which the Secret with the API keys is mounted. If it is None, clients do not need a
    key. `tls_dir` is the folder in which the TLS Secret is mounted. If it is None, the server uses HTTP without TLS.
    """
    if port is None:
        return
    openai = service.spec.openai
    yield f"--openai-port={port}"
    if api_keys_dir is not None:
        yield f"--openai-api-keys-dir={api_keys_dir}"
    if tls_dir is not None:
        yield from (f"--openai-ssl-{option}={tls_dir}/{file}" for option, file in TLS_FILES.items())
    # Yield an option only if its value differs from the server's default. Pods with another image may not
    # support the option.
    if openai.apiServerCount > 1:
        yield f"--openai-api-server-count={openai.apiServerCount}"
    if openai.sharedPrefixCache:
        yield "--openai-shared-prefix-cache"
    if openai.live:
        yield "--openai-live"
    if openai.generationConfig != "auto":
        yield f"--openai-generation-config={openai.generationConfig}"
    for origin in openai.corsAllowedOrigins:
        yield f"--openai-cors-origin={origin}"
    if openai.limits.maxBodySize is not None:
        yield f"--openai-max-body-bytes={to_bytes(openai.limits.maxBodySize)}"


def chat_template_path(service: LLMService) -> str | None:
    """Return the path of the chat template in a pod. If it is None, the engine uses the template of the checkpoint."""
    template = service.spec.openai.chatTemplate
    if template is None:
        return None
    folder = object_names.ENGINE_DIR if template.text is not None else object_names.CHAT_TEMPLATE_DIR
    return f"{folder}/{object_names.CHAT_TEMPLATE_FILE}"
