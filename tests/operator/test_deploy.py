# SPDX-License-Identifier: Apache-2.0
"""Dockerfiles and the compose file, checked without a container engine.

Nothing is built. The tests check that every path, module, extra, port and option exists.
"""

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from quire_operator.api import crd
from quire_operator.api.yaml_manifest import read_manifests
from quire_operator.cli import main
from quire_spec import constants

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())
PORTS = [
    *(constants.HTTP_PORT, constants.GRPC_PORT, constants.SERVER_METRICS_PORT, constants.HEALTH_PORT),
    constants.OPENAI_PORT,
]


def stages(file):
    """Map each stage name to its instructions (word, arguments), with continued lines joined."""
    text = "\n".join(line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#"))
    result, name = {}, None
    for line in text.replace("\\\n", " ").splitlines():
        word, _, arguments = line.strip().partition(" ")
        if word == "FROM":
            name = arguments.partition(" AS ")[2]
            assert name, f"{file}: a stage without a name: {line}"
            result[name] = []
        if word:
            result.setdefault(name, []).append((word, arguments.strip()))
    return result


def arguments_of(stage, word):
    return [arguments for name, arguments in stage if name == word]


@pytest.fixture(params=["backend/Dockerfile", "operator/Dockerfile"])
def dockerfile(request):
    return stages(request.param)


def final(dockerfile):
    """Return the stages that no other stage copies from: the images."""
    sources = {arguments.split()[0] for stage in dockerfile.values() for arguments in arguments_of(stage, "COPY")}
    return {n: stage for n, stage in dockerfile.items() if n is not None and f"--from={n}" not in sources}


def build_context():
    """Return the paths that .dockerignore includes."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    return {line.removeprefix("!") for line in lines if line.startswith("!")}


def test_copied_files_exist_and_are_in_the_build_context(dockerfile):
    for name, stage in dockerfile.items():
        for arguments in arguments_of(stage, "COPY"):
            *sources, _ = shlex.split(arguments)
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in dockerfile, name
                continue
            for source in sources:
                assert (ROOT / source).exists(), source
                assert source.partition("/")[0] in build_context(), source


def test_wheel_stage_copies_all_sources_of_the_wheel(dockerfile):
    copied = {source for arguments in arguments_of(dockerfile["wheel"], "COPY") for source in arguments.split()[:-1]}
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], *wheel["packages"]]
    assert {path.partition("/")[0] for path in [*needed, *wheel["force-include"], "pyproject.toml"]} <= copied


@pytest.mark.parametrize("file", ["backend/Dockerfile", "operator/Dockerfile"])
def test_dockerfiles_pass_hadolint(file):
    # DL3008 requires pinned versions of apt packages, but the base image defines them. DL3059 requires fewer RUNs.
    # DL3013 requires exact versions of Python packages.
    ignored = [f"--ignore={rule}" for rule in ("DL3008", "DL3059", "DL3013")]
    check = [str(Path(sys.executable).with_name("hadolint")), "--no-color", *ignored, file]
    result = subprocess.run(check, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_operator_image_has_only_the_installed_package():
    image = final(stages("operator/Dockerfile"))["operator"]
    assert arguments_of(image, "COPY") == ["--from=installed /opt/quire /opt/quire"]
    assert not arguments_of(image, "RUN")
    assert yaml.safe_load(arguments_of(image, "ENTRYPOINT")[0]) == ["quire"]


def test_images_run_as_the_default_user_of_the_crd(dockerfile):
    user = crd.load_schema()["properties"]["spec"]["properties"]["security"]["properties"]["runAsUser"]["default"]
    for stage in final(dockerfile).values():
        assert arguments_of(stage, "USER")[-1] == f"{user}:{user}"
        after = [word for word, _ in stage][[word for word, _ in stage].index("USER") :]
        assert "RUN" not in after


def test_entry_points_exist(dockerfile):
    for stage in final(dockerfile).values():
        (entry,) = arguments_of(stage, "ENTRYPOINT")
        program, *rest = yaml.safe_load(entry)
        if program == "tini":
            assert any("install --yes --no-install-recommends tini" in run for run in arguments_of(stage, "RUN"))
            assert rest[:3] == ["--", "python3", "-m"]
            assert importlib.util.find_spec(rest[3]) is not None
        else:
            assert program in PROJECT["project"]["scripts"]


def test_images_for_other_processors_emulate_only_short_commands():
    """What takes long runs in stages on the builder's own processor. The base image of gpu is for one processor."""
    dockerfile = stages("backend/Dockerfile")
    emulated = {n for n, stage in dockerfile.items() if n and "$BUILDPLATFORM" not in arguments_of(stage, "FROM")[0]}
    assert emulated - {"gpu"} == {"package", "cpu"}
    assert arguments_of(dockerfile["package"], "FROM") == ["dependencies AS package"]
    programs = {part.split()[0] for run in arguments_of(dockerfile["cpu"], "RUN") for part in run.split("&&")}
    assert programs == {"apt-get", "rm", "install"}


def test_gpu_image_has_a_compiler_for_triton():
    """triton/runtime/build.py compiles a launcher for each kernel, so no pod starts without a compiler."""
    installed = " ".join(arguments_of(stages("backend/Dockerfile")["gpu"], "RUN")).split()
    assert {"gcc", "libc6-dev", "libpython3-dev"} <= set(installed)
    assert "purge" not in installed


def test_extras_exist(dockerfile):
    text = " ".join(run for stage in dockerfile.values() for run in arguments_of(stage, "RUN"))
    extras = {extra for group in re.findall(r"\.whl\)\[([\w,]+)\]", text) for extra in group.split(",")}
    extras |= set(re.findall(r"extras\['(\w+)'\]", text))
    assert extras
    assert extras <= set(PROJECT["project"]["optional-dependencies"])


def test_gpu_image_does_not_install_the_server_from_pypi(tmp_path):
    """Run the command of the Dockerfile with another output folder on the real pyproject.toml."""
    (command,) = arguments_of(stages("backend/Dockerfile")["requirements"], "RUN")
    *_, program, flag, script = shlex.split(command)
    assert (program, flag) == ("python3", "-c")
    script = script.replace("/requirements/", f"{tmp_path}/")
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
    needs = {kind: (tmp_path / f"{kind}.txt").read_text().splitlines() for kind in ("cpu", "gpu")}
    for lines in needs.values():
        assert {"torch", "numpy", "aiohttp", "pyyaml", "tokenizers"} <= {re.match(r"[\w-]+", line)[0] for line in lines}
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [
        PROJECT["project"]["dependencies"],
        *(extras[e] for e in ("engine", "streamer", "tracing", "trust", "images", "server", "openai", "operator")),
    ]
    assert set(needs["cpu"]) == {line for lines in needed for line in lines}
    assert not any(line.startswith("nvidia-pytriton") for line in needs["gpu"])
    assert not any(line.startswith("numpy") and "<2" in line for line in needs["gpu"])


def test_base_images_have_no_registry(dockerfile):
    arguments = dict(pair.partition("=")[::2] for pair in arguments_of(dockerfile[None], "ARG"))
    for name, stage in final(dockerfile).items():
        base = arguments_of(stage, "FROM")[0].partition(" AS ")[0]
        variable = re.fullmatch(r"(?:--platform=\$\w+ )?\$\{(\w+)(:-[a-z-]+)?\}", base)
        assert variable, name
        assert "/" not in arguments[variable[1]], name
        if name == "gpu":
            assert arguments["SERVER_IMAGE"] == ""


def test_images_expose_all_ports():
    for stage in final(stages("backend/Dockerfile")).values():
        assert [int(port) for port in arguments_of(stage, "EXPOSE")[0].split()] == PORTS


def test_compose_file_is_valid():
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yaml"]
    result = subprocess.run(check, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


def default(text):
    """Replace the variables in a text of the compose file by their defaults."""
    return re.sub(r"\$\{\w+(?::-([^}]*))?\}", lambda match: match[1] or "", text)


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_compose_service_uses_existing_targets_and_options(profile):
    service = COMPOSE["services"][profile]
    assert service["profiles"] == [profile]
    build = service["build"]
    built = stages(build["dockerfile"])
    assert build["target"] in final(built)
    assert set(build["args"]) <= {a.partition("=")[0] for stage in built.values() for a in arguments_of(stage, "ARG")}
    assert service["entrypoint"] == ["tini", "--", "quire", "serve"]
    mounts = {target: default(source) for source, target in (split(volume) for volume in service["volumes"])}
    command = [default(argument) for argument in service["command"]]
    # The mount creates the folder of the claim.
    command = [argument.replace("=/srv/models", f"={ROOT}") for argument in command]
    options = main._build_parser().parse_args(["serve", *command])
    folder, _, file = options.file.rpartition("/")
    (document,) = read_manifests(str(ROOT / mounts[folder] / file))
    body = crd.require_valid(document)
    assert str(options.cache_dir).startswith("/var/cache/quire")
    assert str(options.run_dir) in [tmpfs.partition(":")[0] for tmpfs in service["tmpfs"]]
    drain_s = body["spec"]["rollout"]["drainSeconds"]
    assert int(service["stop_grace_period"].removesuffix("s")) > drain_s + 10


def split(volume):
    """Return source and target of a volume in short syntax; the source can contain a default with a colon."""
    source, target = re.fullmatch(r"(\$\{.*?\}|[^:]+):([^:]+)(?::ro)?", volume).groups()
    return source, target


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_compose_service_is_restricted_and_has_a_healthcheck(profile):
    service = COMPOSE["services"][profile]
    published = [default(port).split(":") for port in service["ports"]]
    assert [int(port[-1]) for port in published] == PORTS
    assert {port[0] for port in published} == {"127.0.0.1"}
    assert f":{constants.HEALTH_PORT}/health/ready" in service["healthcheck"]["test"][-1]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["shm_size"] == "1gb"
