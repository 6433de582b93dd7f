# SPDX-License-Identifier: Apache-2.0
"""`make release`: the SBOMs are valid CycloneDX and complete, and the same for the same input; the provenance names the
commit and the file. The index of packages and the images are written here."""

import hashlib
import json
import tarfile
from datetime import UTC, datetime

import pytest
import release
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

COMMIT = release.Commit("0123456789abcdef0123456789abcdef01234567", datetime(2026, 11, 27, tzinfo=UTC))
REPORT = {
    "install": [
        {
            "metadata": {
                "name": name,
                "version": "1.0",
                "license_expression": "MIT",
                "requires_dist": requires,
            },
            "download_info": {"url": "file:///x", "archive_info": {"hashes": {"sha256": "ab" * 32}}},
        }
        for name, requires in (("Quire.LLM", []), ("Some_Package", ["other>=1; python_version > '3'"]), ("other", []))
    ]
}
STATUS = """Package: libc6
Status: install ok installed
Architecture: arm64
Version: 2.36-9
Depends: libgcc-s1, libcrypt1 (>= 1:4.4)

Package: libgcc-s1
Status: install ok installed
Architecture: arm64
Version: 12.2.0-14
Depends: libc6:any (>= 2.35)

Package: removed
Status: deinstall ok config-files
Architecture: arm64
Version: 1
"""


def sbom_of(url, packages):
    """Return the SBOM of a file, after it was validated against CycloneDX's schema."""
    subject = release._component(release.ComponentType.APPLICATION, url, "cd" * 32)
    text = release.sbom(subject, packages, COMMIT.time)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert text == release.sbom(subject, packages, COMMIT.time)
    return json.loads(text)


def edges(document):
    return {node["ref"]: node.get("dependsOn", []) for node in document["dependencies"]}


def test_sbom_of_a_wheel_has_its_resolved_dependencies():
    url = release.PackageURL("pypi", None, "quire-llm", "1.0")
    document = sbom_of(url, release.reported_packages(REPORT))
    assert [each["purl"] for each in document["components"]] == ["pkg:pypi/other@1.0", "pkg:pypi/some-package@1.0"]
    assert document["components"][0]["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert document["components"][0]["licenses"] == [{"license": {"id": "MIT"}}]
    assert document["metadata"]["component"]["hashes"][0]["content"] == "cd" * 32
    assert edges(document)["pkg:pypi/some-package@1.0"] == ["pkg:pypi/other@1.0"]
    assert len(edges(document)[str(url)]) == 2


def test_sbom_of_an_image_has_the_packages_of_debian_and_of_python(tmp_path):
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(STATUS)
    metadata = tmp_path / "usr/local/lib/python3.11/site-packages/torch-2.13.0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.4\nName: torch\nVersion: 2.13.0\nLicense: a\n long text\n\nReadme\n")
    url = release.PackageURL("oci", None, "quire", "sha256:" + "cd" * 32, {"arch": "arm64"})
    document = sbom_of(url, release.installed_packages(tmp_path))
    libc, libgcc = "pkg:deb/debian/libc6@2.36-9?arch=arm64", "pkg:deb/debian/libgcc-s1@12.2.0-14?arch=arm64"
    assert {each["purl"] for each in document["components"]} == {libc, libgcc, "pkg:pypi/torch@2.13.0"}
    assert (edges(document)[libc], edges(document)[libgcc]) == ([libgcc], [libc])


def test_a_wheel_is_released_with_sbom_and_provenance_and_is_reproducible(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_SOURCE_URL", "https://git.example/quire")
    run = release._run
    monkeypatch.setattr(
        release, "_run", lambda *command: json.dumps(REPORT) if "--report=-" in command else run(*command)
    )
    wheels = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        wheels.append(release.release_wheel(tmp_path / name, COMMIT))
    digests = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
    assert digests[0] == digests[1]
    statement = json.loads(wheels[0].with_name(f"{wheels[0].name}.intoto.json").read_text())
    assert statement["subject"] == [{"name": wheels[0].name, "digest": {"sha256": digests[0]}}]
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    definition = statement["predicate"]["buildDefinition"]
    source = {"uri": "git+https://git.example/quire", "digest": {"gitCommit": COMMIT.id}}
    assert definition["resolvedDependencies"] == [source]
    document = json.loads(wheels[0].with_name(f"{wheels[0].name}.cdx.json").read_text())
    assert document["metadata"]["component"]["hashes"][0]["content"] == digests[0]


def test_a_tree_with_changes_is_not_released(monkeypatch):
    monkeypatch.setattr(release, "_run", lambda *command: " M README.md" if "status" in command else "")
    with pytest.raises(SystemExit, match="the working tree has changes"):
        release.Commit.current()


def test_images_are_built_for_all_platforms_from_a_base_image(tmp_path, monkeypatch):
    monkeypatch.setattr(release.platform, "machine", lambda: "x86_64")
    archive, manifest = tmp_path / "a.oci.tar", "registry.example/quire-operator:1"
    bases = [
        None,
        release.Base("localhost/base:1", ("/wheels:/run/pip:ro",)),
        release.Base("registry.example/python:3.11"),
    ]
    builds = []
    for base in bases:
        arguments = ("quire-operator", manifest, release.PLATFORMS, archive, COMMIT, base)
        *commands, push = release.build_commands(*arguments)
        for build, built in zip(commands, ("linux/amd64", "linux/arm64"), strict=True):
            assert build[:3] == ["buildah", "build", f"--platform={built}"]
            assert {"--build-arg=BUILDPLATFORM=linux/amd64", f"--build-arg=TARGETPLATFORM={built}"} <= set(build)
            assert {f"--manifest={manifest}", "--file=operator/Dockerfile"} <= set(build)
            assert f"--timestamp={COMMIT.time.timestamp():.0f}" in build
        assert push == ["buildah", "manifest", "push", "--all", manifest, f"oci-archive:{archive}"]
        builds.append(set(build))
    local = {"--build-arg=PYTHON_IMAGE=localhost/base:1", "--volume=/wheels:/run/pip:ro", "--pull-never"}
    assert builds[1] - builds[0] == local
    assert builds[2] - builds[0] == {"--build-arg=PYTHON_IMAGE=registry.example/python:3.11"}


def test_sboms_name_the_digests_of_the_archive(tmp_path):
    entries = [{"digest": f"sha256:{a}", "platform": {"architecture": a, "os": "linux"}} for a in ("amd64", "arm64")]
    files = {"index.json": {"manifests": [{"digest": "sha256:ab"}]}, "blobs/sha256/ab": {"manifests": entries}}
    with tarfile.open(tmp_path / "a.oci.tar", "w") as archive:
        for name, document in files.items():
            (tmp_path / "file").write_text(json.dumps(document))
            archive.add(tmp_path / "file", name)
    assert release.archived_images(tmp_path / "a.oci.tar") == {"amd64": "amd64", "arm64": "arm64"}
