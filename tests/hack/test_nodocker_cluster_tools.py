# SPDX-License-Identifier: Apache-2.0
"""`make cluster-tools` finds, downloads and builds programs; tested with a real HTTP server and real Go.

The build of Kubernetes takes minutes: `.ci/run` does it, and the cluster tests run the result.
"""

import hashlib
import http.server
import io
import os
import re
import shutil
import subprocess
import tarfile
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from nodocker_cluster import binaries, go_module, helm, images, kubernetes_build, release
from nodocker_cluster.go_module import GoModule
from packaging.requirements import Requirement

VERSION = kubernetes_build.pinned_version()
HELM_VERSION = helm.pinned_version()
requires_go = pytest.mark.skipif(shutil.which("go") is None, reason="Go is not installed: https://go.dev/dl")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("QUIRE_CLUSTER_CACHE", str(folder))
    for variable in ("KUBEBUILDER_ASSETS", binaries.VERSION_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    return folder


def put(folder: Path, *names: str, says: str = "Kubernetes v1.31.4") -> Path:
    """Write programs that print a version."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(f"#!/bin/sh\necho {says}\n")
        (folder / name).chmod(0o755)
    return folder


def write_archive(archive: Path, member: str) -> str:
    """Write an archive with one program, and return the archive's digest."""
    archive.parent.mkdir(parents=True)
    content = f"#!/bin/sh\necho {Path(member).name}\n".encode()
    entry = tarfile.TarInfo(member)
    entry.size = len(content)
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(entry, io.BytesIO(content))
    return hashlib.sha256(archive.read_bytes()).hexdigest()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An HTTP server with the folders of a release."""
    root = tmp_path / "site"
    programs = put(root / "release" / VERSION / "bin/linux/amd64", *(n for n in binaries.ALL_PROGRAMS if n != "etcd"))
    for program in sorted(programs.iterdir()):
        digest = hashlib.sha256(program.read_bytes()).hexdigest()
        program.with_name(f"{program.name}.sha256").write_text(digest)
    name = f"etcd-{release.ETCD_VERSION}-linux-amd64"
    archive = root / "etcd" / release.ETCD_VERSION / f"{name}.tar.gz"
    archive.with_name("SHA256SUMS").write_text(f"{write_archive(archive, f'{name}/etcd')}  {archive.name}\n")
    archive = root / "helm" / f"helm-{HELM_VERSION}-linux-amd64.tar.gz"
    archive.with_name(f"{archive.name}.sha256sum").write_text(
        f"{write_archive(archive, 'linux-amd64/helm')}  {archive.name}\n"
    )

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(root))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        base = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(release, "KUBERNETES_URL", f"{base}/release")
        monkeypatch.setattr(release, "ETCD_URL", f"{base}/etcd")
        monkeypatch.setattr(release, "HELM_URL", f"{base}/helm")
        monkeypatch.setattr(release.platform, "machine", lambda: "x86_64")
        yield root
        server.shutdown()
        thread.join()


def test_finds_the_wanted_version_in_the_cache(cache, monkeypatch):
    assert binaries.find() is None
    put(cache / "v1.99.0", *binaries.ALL_PROGRAMS)
    put(cache / VERSION, *binaries.ALL_PROGRAMS)
    found = binaries.find()
    assert (f"v{'.'.join(map(str, found.version))}", found.folder.name) == (VERSION, VERSION)
    assert str(found) == f"Kubernetes {VERSION[1:]} in {found.folder}"
    monkeypatch.setenv(binaries.VERSION_VARIABLE, "1.99.0")
    assert binaries.find().version == (1, 99, 0)
    monkeypatch.setenv(binaries.VERSION_VARIABLE, "v1.34.4")
    assert binaries.find() is None
    monkeypatch.setenv(binaries.VERSION_VARIABLE, "latest")
    with pytest.raises(binaries.Unavailable, match=f"QUIRE_KUBERNETES is 'latest'; use a version such as {VERSION}"):
        binaries.find()


def test_kubebuilder_assets_take_precedence(cache, tmp_path, monkeypatch):
    put(cache / VERSION, *binaries.ALL_PROGRAMS)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(put(tmp_path / "assets", "etcd", "kube-apiserver", "kubectl")))
    found = binaries.find()
    assert found.version == (1, 31, 4)
    assert not found.has("kube-controller-manager")
    assert "without kube-controller-manager" in str(found)
    with pytest.raises(binaries.Unavailable, match="has no kubelet"):
        found.path("kubelet")
    monkeypatch.setenv(binaries.VERSION_VARIABLE, "v1.34.4")
    with pytest.raises(binaries.Unavailable, match=r"is v1\.34\.4, but KUBEBUILDER_ASSETS has Kubernetes 1\.31\.4"):
        binaries.find()


def test_downloads_and_checks_an_official_release(site, cache):
    said = []
    found = binaries.find_or_build(said.append)
    assert found.folder == cache / VERSION
    assert found.has(*binaries.ALL_PROGRAMS)
    assert subprocess.check_output([found.path("etcd")], text=True) == "etcd\n"
    assert any("downloading kube-apiserver" in line for line in said)
    assert [f.name for f in cache.iterdir()] == [found.folder.name]
    said.clear()
    assert binaries.find_or_build(said.append) == found
    assert said == []


def test_rejects_a_file_with_a_wrong_digest(site, cache):
    (program,) = site.glob("release/*/bin/linux/amd64/kubelet")
    program.write_text("#!/bin/sh\necho else\n")
    with pytest.raises(binaries.Unavailable, match=r"kubelet: its SHA-256 is .*, but .* is published"):
        release.download_kubernetes(put(cache), VERSION, print)
    assert list(cache.iterdir()) == []


def test_downloads_helm_unless_path_has_a_new_one(site, cache, tmp_path, monkeypatch):
    folder = put(tmp_path / "bin", "helm", says="v3.13.3")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert helm.find() is None
    found = helm.find_or_build(print)
    assert found == cache / f"helm-{HELM_VERSION}" / "helm"
    assert subprocess.check_output([found], text=True) == "helm\n"
    assert [f.name for f in cache.iterdir()] == [found.parent.name]
    put(folder, "helm", says="v3.14.0")
    assert helm.find() == helm.find_or_build(print) == folder / "helm"


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (None, "go is not installed; install Go 1.21 or later"),
        ("go1.19.8", "go is go1.19.8; install Go 1.21 or later"),
        ("", "go is of an unknown version; install Go 1.21 or later"),
    ],
)
def test_reports_each_source_that_cannot_provide_the_programs(cache, tmp_path, monkeypatch, says, message):
    monkeypatch.setattr(release, "KUBERNETES_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PATH", str(put(tmp_path / "bin", *(["go"] if says is not None else []), says=says or "")))
    with pytest.raises(binaries.Unavailable) as error:
        binaries.find_or_build(print)
    official, from_source = str(error.value).split("\n  - ")[1:]
    assert official.startswith(f"official release: http://127.0.0.1:9/{VERSION}/bin")
    assert message in from_source


@requires_go
def test_builds_the_tools_of_a_module_and_reports_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(go_module, "REPORT_INTERVAL_S", 0)
    monkeypatch.setenv("GOFLAGS", "-mod=vendor")
    # The comment makes the code new for the user's build cache.
    code = (
        f'package main; import "os"; var version = ""; func main() {{ os.Stdout.WriteString(version) }} // {tmp_path}'
    )
    module = write_module(tmp_path / "hello", code)
    said = []
    module.build(tmp_path / "out", {"main.version": "v7"}, said.append)
    assert subprocess.check_output([tmp_path / "out/hello"], text=True) == "v7"
    assert said[0] == "downloading the source of hello"
    assert any(re.search(r"compiling hello: \d+ of at most \d+ packages", line) for line in said)


@requires_go
def test_a_build_that_fails_names_the_error(tmp_path):
    module = write_module(tmp_path / "hello", "package main; func main() { undefined() }")
    with pytest.raises(binaries.Unavailable, match=r"go build -v failed:\n(.*\n)*.*undefined: undefined"):
        module.build(tmp_path / "out", {}, print)


def write_module(folder: Path, code: str) -> GoModule:
    folder.mkdir()
    (folder / "go.mod").write_text("module example.org/hello\n\ngo 1.24\n\ntool example.org/hello\n")
    (folder / "main.go").write_text(code + "\n")
    return GoModule(folder)


def test_images_are_not_built_without_space(cache, monkeypatch):
    monkeypatch.setattr(images.shutil, "disk_usage", lambda _: SimpleNamespace(free=8 * 2**30))
    monkeypatch.setattr(images.debian, "install_packages", lambda *_: None)
    put(cache / "images", "used").joinpath("used").write_bytes(b"x" * 2**20)
    with pytest.raises(binaries.Unavailable, match=r"images: 8\.0 GiB can be used there, but make e2e needs 14 GiB"):
        images.build(print)


def test_pip_and_uv_in_images_choose_torch_without_cuda_for_each_processor(tmp_path, monkeypatch):
    def build_wheels(pip, torch, machine):
        folder = tmp_path / machine / images.nvidia_stubs.WITHOUT_TRITON
        folder.mkdir(parents=True)
        (folder / images.nvidia_stubs.CONSTRAINTS).write_text(f"torch==2.99\nnvidia-some=={len(machine)}\n")
        return tmp_path / machine

    machines = ["x86_64", "aarch64"]
    monkeypatch.setattr(images.bootstrap, "torch_requirement", lambda pip: None)
    monkeypatch.setattr(images.nvidia_stubs, "missing_programs", lambda machine: [])
    monkeypatch.setattr(images.nvidia_stubs, "build_wheels", build_wheels)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://one.example https://two.example")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    config = images.pip_config(machines)
    uv = tomllib.loads(config.uv_toml)
    assert uv["index-url"] == "https://index.example/simple"
    assert uv["extra-index-url"] == ["https://one.example", "https://two.example"]
    assert uv["constraint-dependencies"] == config.constraints.splitlines()
    for machine in machines:
        chosen = [Requirement(line) for line in config.constraints.splitlines()]
        chosen = [str(each.specifier) for each in chosen if each.marker.evaluate({"platform_machine": machine})]
        assert chosen == ["==2.99", f"=={len(machine)}"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in config.volumes}
    folders = [str(tmp_path / machine) for machine in machines]
    assert [mounted[path] for path in uv["find-links"]][::2] == folders
    assert f"find-links = {' '.join(uv['find-links'])}\n" in config.pip_conf
