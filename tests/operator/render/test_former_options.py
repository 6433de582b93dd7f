# SPDX-License-Identifier: Apache-2.0
"""Every option that the processes of a pod had before pod.json is a field of it, so that no setting was lost.

The table is compared with the parsers of the last commit that had the options, and with the pods that the operator of
that commit rendered.
"""

import json
import re

import pytest
import yaml
from support.old_release import ROOT, old_text
from support.pod_config import merged

from quire_spec.documents.pod_config import PodConfig

KEPT = "an option still"
SUPERVISOR = {
    "--engine": ("engine.json", "engine"),
    "--adapters": ("/a.json", "adapters"),
    "--vllm-repository": ("/r", "vllmRepository"),
    "--device": ("cuda", "engine.device"),
    "--served-name": ("tales", "servedName"),
    "--model-repository": ("/m", "server.modelRepository"),
    "--model-env": (["A", "B"], "server.modelEnv"),
    "--server-arg": (["log-info=true"], "server.serverArgs"),
    "--run-dir": ("/run", KEPT),
    "--cache-dir": ("/cache", KEPT),
    "--host": ("0.0.0.0", "host"),
    "--expose": (["grpc"], "server.expose"),
    "--http-port": (9000, "ports.http"),
    "--grpc-port": (9001, "ports.grpc"),
    "--metrics-port": (9002, "ports.metrics"),
    "--health-port": (9003, "ports.health"),
    "--openai-port": (9004, "openai.port"),
    "--openai-served-model-name": (["a", "org/b"], "openai.servedModelNames"),
    "--openai-api-keys-dir": ("/keys", "openai.apiKeysDir"),
    "--openai-shared-prefix-cache": (True, "openai.sharedPrefixCache"),
    "--openai-live": (True, "openai.live"),
    "--openai-cors-origin": (["https://a", "*"], "openai.corsAllowedOrigins"),
    "--openai-generation-config": ("vllm", "openai.generationConfig"),
    "--openai-ssl-certfile": ("/c.pem", "openai.sslCertfile"),
    "--openai-ssl-keyfile": ("/k.pem", "openai.sslKeyfile"),
    "--openai-api-server-count": (2, "openai.apiServerCount"),
    "--openai-enable-log-requests": (True, "openai.enableLogRequests"),
    "--openai-max-body-bytes": (100, "openai.maxBodyBytes"),
    "--admin-key-file": ("/key", "adminKeyFile"),
    "--allow-runtime-lora-updating": (True, "openai.allowRuntimeLoraUpdating"),
    "--allowed-local-lora-path": (["/l"], "openai.allowedLocalLoraPaths"),
    "--secrets-dir": ("/secrets", "sources.secretsDir"),
    "--pvc": ({"c": "/claim"}, "sources.claims"),
    "--allow-path-sources": (True, "sources.allowPaths"),
    "--max-adapter-bytes": (100, "limits.maxAdapterBytes"),
    "--drain-timeout": (7.5, "limits.drainSeconds"),
    "--verbose": (True, "server.verbose"),
}
"""Options of `python -m quire_server`: a value, and the field of pod.json that contains it."""
FRONT = {
    "--run-dir": KEPT,
    "--served-name": "servedName",
    "--served-model-name": "openai.servedModelNames",
    "--host": "host",
    "--port": "openai.port",
    "--max-body-bytes": "openai.maxBodyBytes",
    "--api-keys-dir": "openai.apiKeysDir",
    "--admin-key-file": "adminKeyFile",
    "--shared-prefix-cache": "openai.sharedPrefixCache",
    "--live": "openai.live",
    "--cors-origin": "openai.corsAllowedOrigins",
    "--generation-config": "openai.generationConfig",
    "--ssl-certfile": "openai.sslCertfile",
    "--ssl-keyfile": "openai.sslKeyfile",
    "--probe-socket": KEPT,
    "--reuse-port": "openai.apiServerCount",
    "--log-requests": "openai.enableLogRequests",
}
"""Options of `python -m quire_server.openai`, and their fields."""
BATCH = {
    "--engine": "engine",
    "--adapters": "adapters",
    "--served-name": "servedName",
    "--run-dir": KEPT,
    "--cache-dir": KEPT,
    "--secrets-dir": "sources.secretsDir",
    "--pvc": "sources.claims",
    **dict.fromkeys(("--input", "--output", "--error-file", "--max-inflight", "--retry-timeout", "--verbose"), KEPT),
    **dict.fromkeys(("--url", "--api-key-env", "--priority", "--timeout"), KEPT),
}
"""Options of `python -m quire_server.batch`, and their fields."""
FIELDS = {option: field for option, (_, field) in SUPERVISOR.items()}


def set_field(document, path, value):
    """Return the document with a value at a path such as openai.port."""
    *outer, name = path.split(".")
    value = {name: value}
    for part in reversed(outer):
        value = {part: value}
    return merged(document, value)


@pytest.mark.parametrize(
    ("module", "table"), [("__main__", FIELDS), ("openai/__main__", FRONT), ("batch/__main__", BATCH)]
)
def test_the_table_has_all_former_options(module, table):
    text = old_text(f"backend/quire_server/{module}.py")
    defined = re.findall(r'(?:^ {8}\(|add_argument\()\s*"(--[a-z-]+)"', text, re.MULTILINE)
    assert sorted(defined) == sorted(table)


def test_every_former_option_is_a_field():
    document = {"engine": {"model": "m"}}
    for value, path in SUPERVISOR.values():
        if path not in (KEPT, "engine"):
            document = set_field(document, path, value)
    # Nothing is dropped and nothing is ignored: the document is read, and every value is written again.
    assert PodConfig.from_json(document).to_json() == document
    assert set(FRONT.values()) | set(BATCH.values()) <= {*FIELDS.values(), KEPT}


def translated(args):
    """Return the pod.json without an engine that stands for the arguments of a pod before pod.json."""
    document = {}
    for argument in args:
        option, _, text = argument.partition("=")
        example, path = SUPERVISOR[option]
        if path in (KEPT, "engine"):
            continue
        section, _, name = path.rpartition(".")
        if isinstance(example, dict):
            key, _, text = text.partition("=")
            value = {key: text}
        elif isinstance(example, list):
            values = document.get(section, {}).get(name, [])
            value = text.split(",") if option == "--expose" else [*values, text]
        else:
            value = True if example is True else type(example)(text)
        document = set_field(document, path, value)
    return document


@pytest.mark.parametrize("name", ["cpu-cluster", "everything", "gpu-llama-3.1-8b", "pvc-qwen2.5-7b"])
def test_pods_have_the_settings_that_their_arguments_had(name):
    path = f"tests/operator/golden/{name}.yaml"
    old, new = (list(yaml.safe_load_all(text)) for text in (old_text(path), (ROOT / path).read_text()))
    (old_files,), (new_files,) = ([m["data"] for m in objects if m.get("immutable")] for objects in (old, new))
    assert new_files["engine.json"] == old_files["engine.json"]
    document, engine = json.loads(new_files["pod.json"]), json.loads(old_files["engine.json"])
    assert document["engine"] == engine
    (args,) = (
        container["args"]
        for manifest in old
        if manifest["kind"] == "Deployment"
        for container in manifest["spec"]["template"]["spec"]["containers"]
        if container["name"] == "server"
    )
    assert PodConfig.from_json({"engine": engine, **translated(args)}) == PodConfig.from_json(document)
