# SPDX-License-Identifier: Apache-2.0
"""Rendered objects: golden files, the schemas of Kubernetes, and arguments that the server and the download accept.

After an intended change run UPDATE_GOLDEN=1 python -m pytest tests/operator/render/test_objects.py, and check the
difference.
"""

import base64
import dataclasses
import importlib.util
import json
import os
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.planning import llm_service
from support.rendering import (
    FULL_SPEC,
    GPU,
    POD_IP,
    RENDER_CONTEXT,
    ROOT,
    example_service,
    only_of_kind,
    plan_of_service,
    pod_document,
    rendered_objects,
    server_container,
)

import quire_server.__main__
from quire_operator.api import crd
from quire_operator.api.llmservice import Device
from quire_operator.api.validation_errors import InvalidService
from quire_operator.cli.render import dump_yaml
from quire_operator.plan.host_memory import start_seconds
from quire_operator.render import model_reader_job, pod_template, workload
from quire_operator.render.context import OPTIONAL_KINDS
from quire_operator.render.object_names import CLAIMS_DIR
from quire_operator.render.objects import render_objects
from quire_server.downloads import model_download
from quire_spec import constants
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.pod_config import PodConfig
from quire_spec.documents.sources import PvcSource, Source
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"


SERVICE = llm_service("")
SERVICES = {
    "gpu-llama-3.1-8b": lambda: (example_service("gpu-llama-3.1-8b.yaml"), "8b"),
    "pvc-qwen2.5-7b": lambda: (example_service("pvc-qwen2.5-7b.yaml"), "qwen"),
    "cpu-cluster": lambda: (example_service("cpu-cluster.yaml"), "qwen-0.5b"),
    "everything": lambda: (llm_service(FULL_SPEC, "all"), "8b"),
}


@pytest.fixture(params=list(SERVICES))
def rendered(request):
    service, model = SERVICES[request.param]()
    return (
        request.param,
        service,
        plan_of_service(service, model),
        render_objects(service, plan_of_service(service, model), RENDER_CONTEXT).manifests,
    )


def test_golden(rendered):
    name, service, plan, manifests = rendered
    text = dump_yaml(manifests)
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text(), f"if the change is intended, UPDATE_GOLDEN=1 writes {file.name} again"
    assert list(yaml.safe_load_all(text)) == json.loads(json.dumps(manifests))
    assert render_objects(service, plan, RENDER_CONTEXT).manifests == manifests


def test_objects_match_the_schemas_of_kubernetes(rendered):
    """Optional kinds (PodMonitor, ScaledObject, InferencePool) are CRDs without a schema in Kubernetes."""
    _, _, _, manifests = rendered
    checked = [m for m in manifests if m["kind"] not in OPTIONAL_KINDS]
    assert len(checked) >= 8
    for manifest in checked:
        for version in ("1.37", "1.33"):
            kubernetes_validate.validate(manifest, version, strict=True)


def pod_config(manifests):
    """Return the pod.json that the container mounts, and the arguments of the supervisor."""
    template, container = server_container(manifests)
    args = quire_server.__main__._build_parser().parse_args(container["args"])
    maps = {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] in ("ConfigMap", "Secret")}
    volumes = {v["name"]: v for v in template["volumes"]}
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == str(args.config.parent)]
    return PodConfig.from_json(json.loads(maps[volumes[mount["name"]]["configMap"]["name"]][args.config.name])), args


def test_server_reads_the_rendered_files(rendered):
    _, service, plan, manifests = rendered
    template, container = server_container(manifests)
    config, args = pod_config(manifests)
    assert config.servedName == service.served_name
    assert config.host == "0.0.0.0"
    assert {p["containerPort"] for p in container["ports"]} == set(config.named_ports.values())
    assert config.limits.drainSeconds == service.spec.rollout.drainSeconds
    # gRPC varies the age by 10 %.
    assert 1.1 * constants.GRPC_CONNECTION_AGE_S + 2 < pod_template.PROPAGATION_S
    assert template["terminationGracePeriodSeconds"] > pod_template.PROPAGATION_S + config.limits.drainSeconds + 30
    # The files that the server reads are in the mounted ConfigMaps and Secrets.
    maps = {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] in ("ConfigMap", "Secret")}
    volumes = {v["name"]: v for v in template["volumes"]}
    mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
    files = maps[mounts[str(args.config.parent)]["configMap"]["name"]]
    engine = config.engine
    assert EngineConfig.from_json(json.loads(files["engine.json"])) == engine, "images before pod.json read engine.json"
    catalog = maps[mounts[str(config.adapters.parent)]["configMap"]["name"]]["adapters.json"]
    assert AdapterCatalog.from_json(json.loads(catalog)) == service.build_catalog()
    key = maps[mounts[str(config.adminKeyFile.parent)]["secret"]["secretName"]][config.adminKeyFile.name]
    assert base64.b64decode(key) == b"k"
    assert mounts[str(config.sources.secretsDir)]["secret"]["optional"]
    for folder in (engine.model, args.run_dir, args.cache_dir, *config.sources.claims.values()):
        assert any(Path(folder).is_relative_to(path) for path in mounts), folder
    openai = config.openai
    secrets = [] if openai is None else [openai.apiKeysDir, openai.sslCertfile and openai.sslCertfile.parent]
    for folder in filter(None, secrets):
        assert not mounts[str(folder)]["secret"].get("optional"), folder
    assert engine.max_model_len == plan.maxModelLen.value
    assert engine.max_num_seqs == plan.maxNumSeqs.value
    assert engine.device == ("cpu" if service.spec.device is Device.CPU else "cuda")
    assert all("subPath" not in m for m in container["volumeMounts"])


KV_TIERS = """
model: {source: {huggingFace: {repo: o/m}}}
adapters: [{name: a, source: {pvc: {claimName: loras}}}]
engine: {kvCacheOffloading: {memory: 16Gi, secondary: [{folder: %s, size: 40Gi}]}}
"""


def test_loaded_ranks_limit_the_rank_instead_of_max_rank():
    """Therefore, adapters of a higher rank than before restart no pod."""
    template = []
    for max_rank, loaded in ((16, ", maxLoadedRanks: 192"), (32, ", maxLoadedRanks: 192"), (32, "")):
        service = llm_service(f"lora: {{maxLoaded: 9, maxRank: {max_rank}{loaded}}}")
        manifests = render_objects(service, plan_of_service(service), RENDER_CONTEXT).manifests
        template.append(server_container(manifests)[0])
        engine = pod_config(manifests)[0].engine
        expected = (128, 192, 192) if loaded else (32, None, 288)
        assert (engine.max_lora_rank, engine.max_loaded_lora_ranks, engine.total_lora_rank) == expected
    assert template[0] == template[1] != template[2]


@pytest.mark.parametrize(
    ("folder", "volume", "request_", "path"),
    [
        ("{emptyDir: {}}", {"emptyDir": {"sizeLimit": "51200Mi"}}, {"ephemeral-storage": "51200Mi"}, "/mnt/kv-blocks"),
        (
            "{pvc: {claimName: blocks, path: team/a}}",
            {"persistentVolumeClaim": {"claimName": "blocks"}},
            {},
            "/mnt/kv-blocks/team/a",
        ),
    ],
)
def test_kv_folder_is_a_writable_volume_of_the_pods(folder, volume, request_, path):
    service = llm_service(KV_TIERS % folder)
    manifests = render_objects(service, plan_of_service(service), RENDER_CONTEXT).manifests
    template, container = server_container(manifests)
    engine = pod_config(manifests)[0].engine
    assert (engine.kv_offloading_size, engine.kv_offloading_folder, engine.kv_offloading_folder_size) == (16, path, 40)
    assert {"name": "kv-blocks", **volume} in template["volumes"]
    assert {"name": "kv-blocks", "mountPath": "/mnt/kv-blocks"} in container["volumeMounts"]
    (job,) = [m["spec"]["template"]["spec"]["containers"][0] for m in manifests if m["kind"] == "Job"]
    assert "--digest" in job["args"], "pods cannot keep it, because they mount the model read-only"
    probe = container["startupProbe"]
    seconds = start_seconds(2 * plan_of_service(service).modelBytes, downloads=False, gpu=True)
    assert probe["periodSeconds"] * probe["failureThreshold"] >= seconds, "it can read the weights twice"
    requests = container["resources"]["requests"]
    assert {name: requests[name] for name in requests if name == "ephemeral-storage"} == request_


STREAMED = """
model: {source: {s3: {uri: s3://models/llama, credentialsSecretRef: {name: store}}}}
engine: {loadFormat: runai_streamer}
"""


@pytest.mark.parametrize(
    ("spec", "streams"),
    [
        ("cache: {mode: EmptyDir}", True),
        ("cache: {mode: PVC}", False),  # the pods read the claim
        ("cache: {mode: EmptyDir}\ntrust: {signers: [{name: a, identity: {subject: a, issuer: https://a}}]}", False),
    ],
)
def test_pods_that_stream_weights_download_none(spec, streams):
    service = llm_service(STREAMED + spec)
    manifests = render_objects(service, plan_of_service(service), RENDER_CONTEXT).manifests
    template, container = server_container(manifests)
    jobs = [m["spec"]["template"]["spec"]["containers"][0] for m in manifests if m["kind"] == "Job"]
    (download,) = [*template.get("initContainers", []), *jobs]
    assert ("--stream-weights" in download["args"]) == streams
    assert pod_config(manifests)[0].engine.load_format == "runai_streamer"
    # The engine finds the Secret where the download found it.
    (mount,) = [m for m in download["volumeMounts"] if m["name"] == "credentials"]
    assert mount in container["volumeMounts"] and f"--secrets-dir={mount['mountPath']}" in download["args"]


@pytest.mark.parametrize("claim", ["loras", "s-models"])
def test_kv_folder_must_not_be_on_the_claim_of_a_source(claim):
    service = llm_service(KV_TIERS % f"{{pvc: {{claimName: {claim}}}}}")
    with pytest.raises(ConfigError) as error:
        render_objects(service, plan_of_service(service), RENDER_CONTEXT)
    field = "spec.engine.kvCacheOffloading.secondary[0].folder.pvc.claimName"
    assert str(error.value) == f"{field}: {claim!r} is also the claim of a model or an adapter; use another claim"


def test_writable_folders_are_volumes(rendered):
    name, _, _, manifests = rendered
    template, container = server_container(manifests)
    writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
    # The folders that backend/Dockerfile creates, /tmp and /dev/shm.
    dockerfile = (ROOT / "backend/Dockerfile").read_text()
    engine_config = re.search(r"install --directory --owner=1000 --group=1000 (.*) *$", dockerfile, re.M)[1].split()
    assert writable == {*engine_config, "/tmp", "/dev/shm"}
    assert container["securityContext"]["readOnlyRootFilesystem"] is (name != "everything")
    assert template["automountServiceAccountToken"] is False


def test_probes_use_the_supervisor_and_allow_time_for_a_large_model(rendered):
    _, _, _, manifests = rendered
    _, container = server_container(manifests)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "health"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    startup = container["startupProbe"]
    assert startup["httpGet"]["path"] == "/health/ready"
    # 8B: 2 x (60 s + 120 s for CUDA graphs) + 160 s from a volume at 0.1 GB/s. Tiny model: slightly more than 2 x 60 s.
    seconds = startup["periodSeconds"] * startup["failureThreshold"]
    assert 120 <= seconds <= 530
    assert seconds < next(m for m in manifests if m["kind"] == "Deployment")["spec"]["progressDeadlineSeconds"]


@pytest.mark.parametrize("gigabytes", [1, 16, 141, 800])
def test_a_slow_volume_is_read_within_the_time_for_the_start(gigabytes):
    """A network file system at 0.1 GB/s, then the start of the processes and CUDA graphs."""
    seconds = start_seconds(gigabytes * 10**9, downloads=False, gpu=True)
    assert gigabytes * 10 + 60 + 120 <= seconds <= gigabytes * 10 + 2 * 60 + 2 * 120
    assert start_seconds(gigabytes * 10**9, downloads=True, gpu=True) >= seconds + gigabytes * 5


def test_names_and_selectors_are_consistent(rendered):
    _, service, _, manifests = rendered
    for manifest in manifests:
        assert len(manifest["metadata"]["name"]) <= 63
        assert manifest["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "quire-operator"
        assert manifest["metadata"].get("namespace") == service.namespace
    deployment = next(m for m in manifests if m["kind"] == "Deployment")
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    for manifest in manifests:
        if manifest["kind"] == "Service":
            assert manifest["spec"]["selector"] == selector


def test_longest_service_name_gives_valid_object_names():
    service = dataclasses.replace(example_service("gpu-llama-3.1-8b.yaml"), name="a" * 48)
    assert max(len(name) for _, name in rendered_objects(service)) <= 63


# The CRD refuses the keys of the operator. The rendering keeps them all the same.
LABELS = {"team": "a", "llm-d.ai/engine-type": "other", "quire.dev/brings": "x", "app.kubernetes.io/instance": "stolen"}
ANNOTATIONS = {"owner": "b", "quire.dev/plan": "other"}
METADATA = """
replicas: 2
model: {source: {huggingFace: {repo: o/m, tokenSecretRef: {name: hf-token, key: token}}}}
observability: {metricsLabels: {release: monitoring}}
networking: {inferencePool: {endpointPicker: {name: picker}}}
podTemplate: {metadata: {labels: {sidecar: "false", app.kubernetes.io/name: stolen}, annotations: {note: x}}}
"""


@pytest.mark.parametrize("kind", ["HorizontalPodAutoscaler", "ScaledObject"])
def test_labels_and_annotations_reach_every_object_and_override_none_of_the_operator(kind):
    scaling = {"kind": kind, "maxReplicas": 4, "minReplicas": 2}
    scaling |= {"prometheusAddress": "http://p:9090"} if kind == "ScaledObject" else {}
    service = llm_service(f"{GPU}{METADATA}autoscaling: {json.dumps(scaling)}")
    with_metadata = dataclasses.replace(
        service, spec=dataclasses.replace(service.spec, labels=LABELS, annotations=ANNOTATIONS)
    )
    plain, objects = rendered_objects(service), rendered_objects(with_metadata)
    plain["Job", "reader"] = model_reader_job.job(service, Source(pvc=PvcSource("c")), "i:1")
    objects["Job", "reader"] = model_reader_job.job(with_metadata, Source(pvc=PvcSource("c")), "i:1")
    assert objects.keys() == plain.keys()
    assert len({kind for kind, _ in objects}) == 12
    for key, manifest in objects.items():
        metas, plain_metas = ([m["metadata"]] for m in (manifest, plain[key]))
        if key[0] in ("Deployment", "Job"):
            metas.append(manifest["spec"]["template"]["metadata"])
            plain_metas.append(plain[key]["spec"]["template"]["metadata"])
            assert (metas[1]["labels"]["sidecar"], metas[1]["annotations"]["note"]) == ("false", "x"), key
        for meta, plain_meta in zip(metas, plain_metas, strict=True):
            for field, values in (("labels", LABELS), ("annotations", ANNOTATIONS)):
                assert meta[field] == {**values, **plain_meta.get(field, {})}, key
        if "selector" in manifest.get("spec", {}):
            assert "team" not in json.dumps(manifest["spec"]["selector"]), key


# Effects of changes.


def changed(text, other, model="8b"):
    """Return the keys of objects that differ between two specs, and whether the pod template differs."""
    left, right = rendered_objects(llm_service(text), model), rendered_objects(llm_service(other), model)
    changed_objects = {key for key in left.keys() | right.keys() if left.get(key) != right.get(key)}
    return changed_objects, only_of_kind(left, "Deployment")["spec"]["template"] != only_of_kind(right, "Deployment")[
        "spec"
    ]["template"]


def test_adapters_never_restart_pods():
    hub = "{huggingFace: {repo: o/a, tokenSecretRef: {name: other}}}"
    http = "{http: {url: http://h:8080/a}}"
    changed_objects, restarted = changed(
        GPU, f"{GPU}adapters: [{{name: a, source: {hub}}}, {{name: b, source: {http}}}]"
    )
    assert not restarted
    assert {kind for kind, _ in changed_objects} == {"ConfigMap", "NetworkPolicy"}
    assert changed(GPU, f"{GPU}adapters: [{{name: a, source: {http}, pinned: true, expose: Parameter}}]")[1] is False


def test_engine_and_model_changes_restart_pods():
    for other in ("engine: {maxNumQueuedReqs: 9}", "lora: {maxRank: 32}", "rollout: {drainSeconds: 5}"):
        assert changed(GPU, GPU + other)[1], other
    changed_objects, restarted = changed(GPU, f"{GPU}model: {{source: {{huggingFace: {{repo: o/m, revision: v2}}}}}}")
    assert restarted
    assert {kind for kind, _ in changed_objects} == {"ConfigMap", "Job", "Deployment"}


def test_pinning_planned_values_does_not_restart_pods():
    plan = plan_of_service(llm_service(GPU))
    pinned = f"engine: {{maxModelLen: {plan.maxModelLen.value}, maxNumSeqs: {plan.maxNumSeqs.value}, blockSize: 16}}"
    changed_objects, restarted = changed(GPU, GPU + pinned)
    assert not restarted
    assert changed_objects == {("Deployment", "s")}, "only the annotation with the plan's digest changes"


def test_operator_upgrade_does_not_change_planned_pods():
    """pod.json contains no default values, and the image comes from the plan, so a new release changes neither."""
    service = llm_service(GPU)
    objects = rendered_objects(service)
    document = pod_document(objects.values())
    config = document["engine"]
    assert set(config) < {field.name for field in dataclasses.fields(EngineConfig)}
    assert "seed" not in config and "swap_space" not in config
    assert set(document) == {"servedName", "engine", "adapters", "host", "adminKeyFile", "openai", "sources", "limits"}
    assert document["openai"] == {}
    # A planned value must not depend on the defaults of the pods' image.
    assert config["block_size"] == EngineConfig("m").block_size
    template, _ = server_container(objects.values())
    assert template["containers"][0]["image"] == plan_of_service(service).image.value


# Single objects.


def test_memory_and_gpus_of_the_container():
    _, container = server_container(rendered_objects(llm_service(GPU)).values())
    plan = plan_of_service(llm_service(GPU))
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert container["resources"]["requests"] == {"cpu": "3", "memory": f"{plan.hostBytes.total // 2**20}Mi"}
    _, container = server_container(
        rendered_objects(llm_service("device: CPU\nruntime: {cpu: '4', memory: 60Gi}"), "qwen").values()
    )
    assert container["resources"] == {"requests": {"cpu": "4", "memory": "60Gi"}, "limits": {"memory": "60Gi"}}
    _, container = server_container(
        rendered_objects(
            llm_service("gpu: {product: NVIDIA-L4, memory: 40Gi, resourceName: nvidia.com/mig-3g.40gb}")
        ).values()
    )
    assert container["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": "1"}


def test_model_folder_and_volume():
    objects = rendered_objects(llm_service(GPU))
    job = only_of_kind(objects, "Job")["spec"]["template"]["spec"]
    (args,) = [c["args"] for c in job["containers"]]
    into = next(a for a in args if a.startswith("--into=")).removeprefix("--into=")
    config = pod_document(objects.values())["engine"]
    assert config["model"] == into
    assert only_of_kind(objects, "PersistentVolumeClaim")["spec"]["resources"]["requests"]["storage"] == "35230Mi"
    # EmptyDir: an init container downloads the model. A claim source: nothing is downloaded.
    objects = rendered_objects(llm_service(f"{GPU}cache: {{mode: EmptyDir}}"))
    template, _ = server_container(objects.values())
    assert [c["args"] for c in template["initContainers"]] == [args]
    assert not {"Job", "PersistentVolumeClaim"} & {kind for kind, _ in objects}
    objects = rendered_objects(llm_service(f"{GPU}model: {{source: {{pvc: {{claimName: c, path: m/n}}}}}}"))
    template, _ = server_container(objects.values())
    assert "initContainers" not in template
    config = pod_document(objects.values())["engine"]
    assert config["model"] == "/mnt/claims/c/m/n"


@pytest.mark.parametrize(
    ("models", "folder"),
    [
        ("{pvc: {claimName: m, path: a/b}}", "/mnt/claims/m/a/b"),
        ("{pvc: {claimName: m}}", "/mnt/claims/m/"),
        ("{path: /opt/models}", "/opt/models"),
    ],
)
def test_other_models_are_mounted_read_only(models, folder):
    runtime = f"env: [{{name: A, value: b}}], serverArgs: [log-verbose=1, rate-limit=off], models: {models}"
    objects = rendered_objects(llm_service(f"{GPU}runtime: {{{runtime}}}"))
    template, container = server_container(objects.values())
    server = pod_config(objects.values())[0].server
    assert server.modelRepository == Path(folder) and server.modelEnv == ("A",)
    assert server.serverArgs == ("log-verbose=1", "rate-limit=off")
    claims = [v["persistentVolumeClaim"] for v in template["volumes"] if "persistentVolumeClaim" in v]
    mounts = [m for m in container["volumeMounts"] if m["mountPath"].startswith("/mnt/claims")]
    assert ({"claimName": "m", "readOnly": True} in claims) == ("pvc" in models)
    assert [m["mountPath"] for m in mounts if m["readOnly"]] == (["/mnt/claims/m"] if "pvc" in models else [])
    # Nothing else changes: other models get no port and no peer.
    plain = rendered_objects(llm_service(GPU))
    for kind in ("NetworkPolicy", "Service"):
        assert objects[kind, "s"] == plain[kind, "s"]


def test_tls_of_the_grpc_port():
    arguments = "grpc-use-ssl=true, grpc-server-cert=/etc/tls/tls.crt, grpc-server-key=/etc/tls/tls.key"
    objects = rendered_objects(llm_service(f"{GPU}runtime: {{serverArgs: [{arguments}]}}"))
    protocols = {port["name"]: port["appProtocol"] for port in objects["Service", "s"]["spec"]["ports"]}
    assert protocols["grpc"] == "https" and protocols["http"] == "http"
    service = llm_service(f"{GPU}runtime: {{serverArgs: [grpc-use-ssl=true]}}")
    with pytest.raises(ConfigError, match=r"spec.runtime.serverArgs: grpc-use-ssl=true requires grpc-server-cert"):
        render_objects(service, plan_of_service(service), RENDER_CONTEXT)


def test_download_parses_the_arguments_of_the_job(monkeypatch):
    service = llm_service(
        f"{GPU}model: {{source: {{s3: {{uri: s3://bucket/m, credentialsSecretRef: {{name: store}}}}}}}}"
    )
    (container,) = only_of_kind(rendered_objects(service), "Job")["spec"]["template"]["spec"]["containers"]
    assert container["command"][:4] == ["tini", "--", "python3", "-m"]
    assert importlib.util.find_spec(container["command"][4]) is not None
    pod_ip, port = container["env"]
    assert pod_ip == POD_IP
    monkeypatch.setenv(port["name"], port["value"])
    args = model_download._parser().parse_args(container["args"])
    assert [p["containerPort"] for p in container["ports"] if p["name"] == "health"] == [args.progress_port]
    assert [model_download._parse_source(source) for source in args.source] == [service.spec.model.source]
    mounts = {m["mountPath"]: m.get("readOnly", False) for m in container["volumeMounts"]}
    assert mounts[str(args.into[0].parent)] is False
    assert mounts[str(args.secrets_dir)] is True
    failing = only_of_kind(rendered_objects(service), "Job")["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]
    assert failing["values"] == [model_download.EXIT_PERMANENT_FAILURE]


HEADS = """
speculativeConfig: {method: eagle3, numSpeculativeTokens: 3, model: {source: SOURCE}}
"""


@pytest.mark.parametrize("model", ["huggingFace: {repo: o/m, tokenSecretRef: {name: hub}}", "pvc: {claimName: m}"])
@pytest.mark.parametrize(
    "heads", ["huggingFace: {repo: o/heads}", "s3: {uri: s3://bucket/heads}", "pvc: {claimName: heads, path: eagle}"]
)
def test_heads_are_downloaded_with_the_model_and_read_from_the_same_folder(model, heads):
    engine = HEADS.strip().replace("SOURCE", f"{{{heads}}}")
    service = llm_service(f"{GPU}model: {{source: {{{model}}}}}\nengine: {{{engine}}}")
    objects = rendered_objects(service)
    manifests, config = objects.values(), pod_document(objects.values())["engine"]
    folders = [config["model"], config["speculative_config"]["model"]]
    jobs = [m for m in manifests if m["kind"] == "Job"]
    downloaded = [f for f in folders if not f.startswith(CLAIMS_DIR)]
    assert len(jobs) == bool(downloaded)
    for job in jobs:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        args = model_download._parser().parse_args(container["args"])
        assert list(map(str, args.into)) == downloaded
        sources = [model_download._parse_source(source) for source in args.source]
        assert sources == [source for source in service.model_sources.values() if source.pvc is None]
    (deployment,) = (m for m in manifests if m["kind"] == "Deployment")
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in deployment["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    expected = {source.pvc.claimName for source in service.model_sources.values() if source.pvc}
    assert claims == expected | ({"s-models"} if downloaded else set())
    if "o/m" in model and "o/heads" in heads:
        # Like an adapter, heads get the token of the model.
        assert service.draft_source.huggingFace.tokenSecretRef.name == "hub"


def test_the_text_of_a_chat_template_is_beside_pod_json():
    def engine(text):
        service = llm_service(f"{GPU}openai: {{chatTemplate: {{text: '{text}'}}}}")
        return next(m for (_, name), m in rendered_objects(service).items() if name.startswith("s-engine"))

    config, path = engine("a"), "/etc/quire/engine/chat_template.jinja"
    assert json.loads(config["data"]["pod.json"])["engine"]["chat_template"] == path
    assert config["data"][Path(path).name] == "a"
    assert config["metadata"]["name"] != engine("b")["metadata"]["name"], "another text replaces the pods"


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    ("spec", "live_modes", "on_one_node"),
    [
        ("", (), True),
        ("replicas: 2", (), False),
        ("replicas: 2", ("ReadWriteOnce",), True),
        ("engine: {pipelineParallelSize: 2}", (), False),
        ("", ("ReadWriteMany",), False),
        ("replicas: 2\ncache: {accessModes: [ReadWriteOnce]}", (), True),
        ("replicas: 2\ncache: {accessModes: [ReadWriteOnce, ReadWriteMany]}", (), False),
        ("cache: {accessModes: [ReadWriteOncePod]}", (), True),
        ("cache: {mode: EmptyDir}", (), False),
        ("model: {source: {pvc: {claimName: c}}}", (), False),
    ],
)
def test_pods_that_share_a_claim_of_one_node_run_on_one_node(spec, live_modes, on_one_node):
    """The Job of the next revision too."""
    context = dataclasses.replace(RENDER_CONTEXT, claim_access_modes=live_modes)
    objects = rendered_objects(llm_service(GPU + spec), context=context)
    pods = {m["kind"]: m["spec"]["template"] for m in objects.values() if m["kind"] in ("Job", "Deployment")}
    for kind, pod in pods.items():
        affinity = pod["spec"].get("affinity", {}).get("podAffinity", {})
        required = affinity.get(REQUIRED, [])
        preferred = affinity.get(PREFERRED, [])
        assert bool(preferred) == (on_one_node and kind == "Deployment")
        # A server pod must start although a pod on a failed node is being deleted for a long time.
        assert bool(required) == (on_one_node and kind == "Job")
        for term in (*required, *(entry["podAffinityTerm"] for entry in preferred)):
            selector = term["labelSelector"]["matchLabels"]
            assert all(selector.items() <= other["metadata"]["labels"].items() for other in pods.values())


def test_the_download_job_keeps_the_affinity_of_the_pod_template():
    own = {"labelSelector": {"matchLabels": {"app": "cache"}}, "topologyKey": "zone"}
    weighted = {"weight": 1, "podAffinityTerm": own}
    node = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": []}}}
    for pod_affinity in ({REQUIRED: [own]}, {PREFERRED: [weighted]}, {REQUIRED: [own], PREFERRED: [weighted]}):
        affinity = json.dumps({**node, "podAffinity": pod_affinity})
        service = llm_service(f"{GPU}podTemplate: {{spec: {{affinity: {affinity}}}}}")
        found = only_of_kind(rendered_objects(service), "Job")["spec"]["template"]["spec"]["affinity"]
        *others, one_node = found["podAffinity"][REQUIRED]
        assert others == pod_affinity.get(REQUIRED, []) and one_node["topologyKey"] == "kubernetes.io/hostname"
        assert found["podAffinity"].get(PREFERRED) == pod_affinity.get(PREFERRED)
        assert found["nodeAffinity"] == node["nodeAffinity"]


@pytest.mark.parametrize("affinity", ["none", "[]", "{podAffinity: none}", f"{{podAffinity: {{{REQUIRED}: 1}}}}"])
def test_the_download_job_has_its_node_although_the_affinity_of_the_pod_template_is_invalid(affinity):
    """The API server rejects the Deployment, and names the field."""
    service = llm_service(f"{GPU}podTemplate: {{spec: {{affinity: {affinity}}}}}")
    found = only_of_kind(rendered_objects(service), "Job")["spec"]["template"]["spec"]["affinity"]
    assert len(found["podAffinity"][REQUIRED]) == 1


def test_claim_ownership_follows_the_deletion_policy():
    assert (
        "ownerReferences" not in only_of_kind(rendered_objects(llm_service(GPU)), "PersistentVolumeClaim")["metadata"]
    )
    deleted = rendered_objects(llm_service(f"{GPU}cache: {{deletionPolicy: Delete}}"))
    annotations = [
        only_of_kind(objects, "PersistentVolumeClaim")["metadata"].get("annotations", {})
        for objects in (rendered_objects(llm_service(GPU)), deleted)
    ]
    kept = {"argocd.argoproj.io/sync-options": "Prune=false", "argocd.argoproj.io/compare-options": "IgnoreExtraneous"}
    assert annotations == [kept, {}]
    assert all(m["metadata"]["ownerReferences"][0]["uid"] == "u-1" for m in deleted.values())
    alone = rendered_objects(llm_service(GPU), context=dataclasses.replace(RENDER_CONTEXT, owner_uid=None))
    assert not any("ownerReferences" in m["metadata"] for m in alone.values())


def test_credentials_are_copied_and_never_in_arguments():
    service = example_service("gpu-llama-3.1-8b.yaml")
    objects = rendered_objects(service)
    data = objects["Secret", "support-credentials"]["data"]
    assert {name: json.loads(base64.b64decode(value)) for name, value in data.items()} == {
        "adapter-store": {"AWS_ACCESS_KEY_ID": "a"}, "hf-token": {"token": "hf"}
    }  # fmt: skip
    assert '"hf"' not in json.dumps([m for m in objects.values() if m["kind"] != "Secret"])
    none = rendered_objects(service, context=dataclasses.replace(RENDER_CONTEXT, credentials={}))
    assert only_of_kind(none, "Deployment") == only_of_kind(objects, "Deployment")
    assert ("Secret", "support-credentials") not in none


def test_disruption_budget_only_for_several_pods():
    assert ("PodDisruptionBudget", "s") not in rendered_objects(llm_service(GPU))
    assert (
        only_of_kind(rendered_objects(llm_service(f"{GPU}replicas: 2")), "PodDisruptionBudget")["spec"][
            "maxUnavailable"
        ]
        == 1
    )
    assert ("PodDisruptionBudget", "s") in rendered_objects(
        llm_service(f"{GPU}autoscaling: {{minReplicas: 2, maxReplicas: 3}}")
    )
    assert ("PodDisruptionBudget", "s") not in rendered_objects(
        llm_service(f"{GPU}replicas: 2\ndisruption: {{pdb: None}}")
    )


def test_autoscalers_scale_the_llmservice():
    hpa = only_of_kind(
        rendered_objects(llm_service(f"{GPU}autoscaling: {{maxReplicas: 4}}")), "HorizontalPodAutoscaler"
    )["spec"]
    target = {"apiVersion": crd.GROUP_VERSION, "kind": "LLMService", "name": "s"}
    assert hpa["scaleTargetRef"] == target
    averages = [m["pods"]["target"]["averageValue"] for m in hpa["metrics"]]
    assert averages == [str(plan_of_service(llm_service(GPU)).maxNumSeqs.value), "2"]
    external = "minReplicas: 0, external: {metric: queue, matchLabels: {pool: s}, value: 3}"
    text = f"{GPU}autoscaling: {{maxReplicas: 4, {external}}}"
    to_zero = only_of_kind(rendered_objects(llm_service(text)), "HorizontalPodAutoscaler")["spec"]
    assert (to_zero["minReplicas"], to_zero["metrics"][:-1]) == (0, hpa["metrics"])
    assert to_zero["metrics"][-1]["external"] == {
        "metric": {"name": "queue", "selector": {"matchLabels": {"pool": "s"}}},
        "target": {"type": "AverageValue", "averageValue": "3"},
    }
    scaled = only_of_kind(rendered_objects(llm_service(FULL_SPEC)), "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"] == target
    assert scaled["triggers"][0]["metadata"]["serverAddress"] == "http://prometheus:9090"


@given(name=st.integers(1, 48).map("a".__mul__), digest=st.text("bcdf0123456789", min_size=5, max_size=10))
def test_the_pattern_of_pod_names_matches_the_pods_of_a_deployment(name, digest):
    """Kubernetes cuts the name of a ReplicaSet and a hyphen to 58 characters, and appends five random ones."""
    pod = f"{name}-{digest}-"[:58] + "x7k2q"
    pattern = workload.pod_name_pattern(dataclasses.replace(SERVICE, name=name))
    assert len(pod) <= 63 and re.fullmatch(pattern, pod)
    assert not re.fullmatch(pattern, f"{name}b-{digest}-x7k2q"), "another Deployment"


def test_the_openai_api_can_have_several_names_of_the_model():
    service = llm_service(f"{GPU}openai: {{servedModelNames: [organization/model, short]}}")
    document = pod_document(rendered_objects(service).values())
    assert document["openai"]["servedModelNames"] == ["organization/model", "short"]
    assert document["servedName"] == "s", "Triton's ports keep the name that is valid in its URLs"


def test_a_scaled_object_has_the_settings_of_keda():
    scaled = only_of_kind(rendered_objects(llm_service(FULL_SPEC)), "ScaledObject")
    prometheus, cron = scaled["spec"]["triggers"]
    assert prometheus["authenticationRef"] == {"name": "thanos", "kind": "TriggerAuthentication"}
    assert prometheus["metadata"]["authModes"] == "bearer" and cron["type"] == "cron"
    assert (scaled["spec"]["pollingInterval"], scaled["spec"]["fallback"]["replicas"]) == (15, 4)
    excluded = scaled["metadata"]["annotations"]["scaledobject.keda.sh/hpa-excluded-labels"].split(",")
    assert set(excluded) == set(scaled["metadata"]["labels"]) - {"cost-center"}
    alone = f"{GPU}autoscaling: {{kind: ScaledObject, maxReplicas: 2, triggers: [{{type: cron, metadata: {{a: b}}}}]}}"
    (trigger,) = only_of_kind(rendered_objects(llm_service(alone)), "ScaledObject")["spec"]["triggers"]
    assert trigger == {"type": "cron", "metadata": {"a": "b"}}


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("", {"kind": "Service", "name": "s", "port": 8004}),
        ("port: http", {"kind": "Service", "name": "s", "port": 8000}),
        ("pool", {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "s"}),
    ],
)
def test_a_route_leads_to_the_service_or_the_pool(text, backend):
    pool = ", inferencePool: {endpointPicker: {name: picker}}" if text == "pool" else ""
    port = f", {text}" if text and text != "pool" else ""
    spec = f"{GPU}networking: {{httpRoute: {{parentRefs: [{{name: gateway}}]{port}}}{pool}}}"
    route = only_of_kind(rendered_objects(llm_service(spec)), "HTTPRoute")["spec"]
    assert route == {"parentRefs": [{"name": "gateway"}], "rules": [{"backendRefs": [backend]}]}


def test_optional_kinds_require_support_of_the_cluster():
    bare = dataclasses.replace(RENDER_CONTEXT, available_kinds=frozenset())
    objects = render_objects(llm_service(FULL_SPEC), plan_of_service(llm_service(FULL_SPEC)), bare)
    assert objects.unavailable_kinds == OPTIONAL_KINDS
    assert not {m["kind"] for m in objects.manifests} & set(OPTIONAL_KINDS)
    assert (
        render_objects(
            llm_service(FULL_SPEC), plan_of_service(llm_service(FULL_SPEC)), RENDER_CONTEXT
        ).unavailable_kinds
        == ()
    )
    without_optional = llm_service(f"{GPU}observability: {{podMonitor: None}}")
    assert render_objects(without_optional, plan_of_service(without_optional), bare).unavailable_kinds == ()


MANY = [f"{{name: a{i}, source: {{http: {{url: 'http://h/{'x' * 2000}'}}}}}}" for i in range(520)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {source: {path: m}}", "spec.model.source.path: 'm' is a local folder, which pods cannot read"),
        ("adapters: [{name: a, source: {path: x}}]", r"spec.adapters\[0\].source.path: 'x' is a local folder"),
        (
            f"adapters: [{', '.join(MANY)}]",
            r"spec.adapters: 520 adapters with their sources need 10\d{5} bytes, but a ConfigMap can have 1000000",
        ),
    ],
)  # fmt: skip
def test_rejects_services_that_no_cluster_can_run(text, message):
    service = llm_service(GPU + text)
    with pytest.raises(ConfigError, match=message):
        render_objects(service, plan_of_service(service), RENDER_CONTEXT)


@pytest.mark.parametrize("value", ["25%", "100%", 2])
def test_a_rollout_can_have_percentages(value):
    text = f"{GPU}rollout: {{maxSurge: {json.dumps(value)}, maxUnavailable: 0%}}"
    deployment = only_of_kind(rendered_objects(llm_service(text)), "Deployment")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": value, "maxUnavailable": "0%"}
    kubernetes_validate.validate(deployment, "1.37", strict=True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("101%", '"101%": must be a number or a percentage; write it like 1 or "25%"'),
        ("1", '"1": must be a number or a percentage; write it like 1 or "25%"'),
        (True, 'true: must be a number or a percentage; write it like 1 or "25%"'),
        (1001, "1001: must be at most 1000"),
    ],
)
def test_rejects_other_sizes_of_a_rollout(value, message):
    text = f"{GPU}rollout: {{maxSurge: {json.dumps(value)}}}"
    with pytest.raises(InvalidService, match=re.escape(f"spec.rollout.maxSurge: {message}")):
        llm_service(text)
