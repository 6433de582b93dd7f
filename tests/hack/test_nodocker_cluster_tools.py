# SPDX-License-Identifier: Apache-2.0
"""`make cluster-tools` finds and downloads Kubernetes' programs; tested with a real HTTP server.

The build from Debian's source takes minutes: `.ci/run` does it, and the cluster tests run the result.
"""

import hashlib
import http.server
import io
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest
from nodocker_cluster import binaries, release


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("QUIRE_CLUSTER_CACHE", str(folder))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    return folder


def put(folder: Path, *names: str, says: str = "Kubernetes v1.31.4") -> Path:
    """Write programs that print a version."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(f"#!/bin/sh\necho {says}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An HTTP server with the folders of a release."""
    root = tmp_path / "site"
    version = f"v{release.MINOR_VERSION}.7"
    programs = put(root / "release" / version / "bin/linux/amd64", *(n for n in binaries.ALL_PROGRAMS if n != "etcd"))
    for program in sorted(programs.iterdir()):
        digest = hashlib.sha256(program.read_bytes()).hexdigest()
        program.with_name(f"{program.name}.sha256").write_text(digest)
    (root / f"release/stable-{release.MINOR_VERSION}.txt").write_text(version)
    etcd = root / "etcd" / release.ETCD_VERSION
    etcd.mkdir(parents=True)
    folder = f"etcd-{release.ETCD_VERSION}-linux-amd64"
    archive = etcd / f"{folder}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        content = b"#!/bin/sh\necho etcd\n"
        entry = tarfile.TarInfo(f"{folder}/etcd")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    (etcd / "SHA256SUMS").write_text(f"{hashlib.sha256(archive.read_bytes()).hexdigest()}  {archive.name}\n")

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
        monkeypatch.setattr(release.platform, "machine", lambda: "x86_64")
        yield root
        server.shutdown()
        thread.join()


def test_finds_the_newest_version_in_the_cache(cache):
    assert binaries.find() is None
    put(cache / "v1.20.2-debian", *binaries.ALL_PROGRAMS)
    put(cache / "v1.36.1", *binaries.ALL_PROGRAMS)
    put(cache / "v1.37.0", "kubectl")
    found = binaries.find()
    assert (found.version, found.folder.name) == ((1, 36, 1), "v1.36.1")
    assert str(found) == f"Kubernetes 1.36.1 in {found.folder}"


def test_kubebuilder_assets_take_precedence(cache, tmp_path, monkeypatch):
    put(cache / "v1.36.1", *binaries.ALL_PROGRAMS)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(put(tmp_path / "assets", "etcd", "kube-apiserver", "kubectl")))
    found = binaries.find()
    assert found.version == (1, 31, 4)
    assert not found.has("kube-controller-manager")
    assert "without kube-controller-manager" in str(found)
    with pytest.raises(binaries.Unavailable, match="has no kubelet"):
        found.path("kubelet")


def test_downloads_and_checks_an_official_release(site, cache):
    said = []
    found = binaries.find_or_build(said.append)
    assert found.folder == cache / f"v{release.MINOR_VERSION}.7"
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
        release.download(cache, print)
    assert list(cache.iterdir()) == []
