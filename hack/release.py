# SPDX-License-Identifier: Apache-2.0
"""`make release`: the files that a release consists of, each with an SBOM and its provenance, in the folder dist.

- the wheel. Two builds of a commit give the same bytes.
- with --images PREFIX, the images PREFIX/quire and PREFIX/quire-operator for several platforms, as archives that
  `buildah manifest push` or `skopeo copy --all` send to a registry. buildah builds them from the Dockerfiles.
  --python-image replaces the base image of the Dockerfiles by an image or a manifest list with all platforms. --debian
  makes such a list from Debian's packages, for a machine that reaches no registry of images.
- for each of them, an SBOM (CycloneDX 1.6) and a provenance (an in-toto statement with a predicate of SLSA 1.0).

Nothing is signed: sign the statements with the key of the publisher, for example with `cosign attest`.
"""

import argparse
import email
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from nodocker_cluster import binaries, images
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parents[1]
BUILD_TYPE = "https://quire.dev/make-release/v1"
"""Identifies the way in which a file was built. It is a name, as the API group is."""
EXTRA = "serve"
"""The extra whose dependencies the SBOM of the wheel lists."""
PLATFORMS = "linux/amd64,linux/arm64"
IMAGES: Mapping[str, Sequence[str]] = {
    "quire": ("--file=backend/Dockerfile", "--target=cpu"),
    "quire-operator": ("--file=operator/Dockerfile",),
}
DEBIAN_BASE = "localhost/quire-base:release"
"""Name of the base image that --debian makes."""


@dataclass(frozen=True, slots=True)
class Package:
    """An installed package."""

    kind: str
    """Type of its package URL: pypi or deb."""
    name: str
    version: str
    license: str = ""
    requires: frozenset[str] = frozenset()
    """Names of packages that it needs, if they are installed."""
    sha256: str = ""
    qualifiers: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> PackageURL:
        """The package URL."""
        namespace = "debian" if self.kind == "deb" else None
        return PackageURL(self.kind, namespace, self.name, self.version, dict(self.qualifiers))


@dataclass(frozen=True, slots=True)
class Base:
    """The image that replaces the base image of the Dockerfiles."""

    name: str
    volumes: tuple[str, ...] = ()
    """Folders that its pip reads, in the form of buildah's option --volume."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that is released."""

    id: str
    time: datetime

    @classmethod
    def current(cls) -> "Commit":
        """Return the commit of the working tree. Raises SystemExit if the tree has changes."""
        if _run("git", "status", "--porcelain"):
            raise SystemExit(
                "release: the working tree has changes; commit them, because the provenance names a commit"
            )
        digest, seconds = _run("git", "log", "-1", "--format=%H %ct").split()
        return cls(digest, datetime.fromtimestamp(int(seconds), UTC))


def source_url(commit: Commit) -> str:
    """Return the URL of the repository: QUIRE_SOURCE_URL, else the remote `origin` without credentials, else the name
    of the commit."""
    command = ["git", "config", "--get", "remote.origin.url"]
    remote = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    url = os.environ.get("QUIRE_SOURCE_URL") or re.sub(r"(?<=://)[^/]*@", "", remote)
    return f"git+{url}" if "://" in url else f"gitoid:commit:sha1:{commit.id}"


def normalized(name: str) -> str:
    """Return the name of a Python package in the form of package URLs."""
    return re.sub(r"[-_.]+", "-", name).lower()


def reported_packages(report: Mapping[str, Any]) -> list[Package]:
    """Return the packages of a report of `pip install --report`."""
    packages = []
    for item in report["install"]:
        metadata, archive = item["metadata"], item["download_info"].get("archive_info", {})
        requires = frozenset(_required_name(text) for text in metadata.get("requires_dist", ()))
        text = metadata.get("license_expression") or metadata.get("license") or ""
        sha256 = archive.get("hashes", {}).get("sha256", "")
        packages.append(Package("pypi", normalized(metadata["name"]), metadata["version"], text, requires, sha256))
    return packages


def installed_packages(root: Path) -> list[Package]:
    """Return the packages in the root folder of an image: those of Debian, and those of Python."""
    status = root / "var/lib/dpkg/status"
    packages = []
    for text in status.read_text().split("\n\n") if status.exists() else ():
        fields = email.message_from_string(text)
        if "installed" in (fields["Status"] or "").split():
            depends = re.split(r"[,|]", fields["Depends"] or "")
            requires = frozenset(word.split()[0].partition(":")[0] for word in depends if word.strip())
            architecture = {"arch": fields["Architecture"]}
            packages.append(Package("deb", fields["Package"], fields["Version"], "", requires, "", architecture))
    for path in sorted(root.glob("**/*.dist-info/METADATA")):
        metadata = email.message_from_string(path.read_text(errors="replace"))
        requires = frozenset(_required_name(text) for text in metadata.get_all("Requires-Dist", ()))
        text = metadata["License-Expression"] or metadata["License"] or ""
        packages.append(Package("pypi", normalized(metadata["Name"]), metadata["Version"], text, requires))
    return packages


def sbom(subject: Component, packages: Iterable[Package], time: datetime) -> str:
    """Return the SBOM of a file as CycloneDX JSON. `subject` is the file; the same arguments give the same text."""
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"{subject.purl} {[str(each) for each in subject.hashes]}"))
    bom.metadata.timestamp, bom.metadata.component = time, subject
    licenses = LicenseFactory()
    components: dict[tuple[str, str], tuple[Component, Package]] = {}
    for package in packages:
        if package.kind == subject.purl.type and package.name == subject.purl.name:
            continue
        # Many packages have the text of their license in this field.
        is_short = package.license and "\n" not in package.license and len(package.license) < 200
        components[package.kind, package.name] = (
            Component(
                type=ComponentType.LIBRARY,
                name=package.name,
                version=package.version,
                purl=package.url,
                bom_ref=str(package.url),
                licenses=[licenses.make_from_string(package.license)] if is_short else [],
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=package.sha256)] if package.sha256 else [],
            ),
            package,
        )
    for component, _ in components.values():
        bom.components.add(component)
    for component, package in components.values():
        needed = (components.get((package.kind, name)) for name in package.requires)
        bom.register_dependency(component, [each[0] for each in needed if each and each[0] is not component])
    bom.register_dependency(subject, [component for component, _ in components.values()])
    return JsonV1Dot6(bom).output_as_string(indent=2)


def provenance(
    name: str, sha256: str, commit: Commit, parameters: Mapping[str, Any], started: datetime, finished: datetime
) -> str:
    """Return an in-toto statement that says from which commit, how and where a file was built."""
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": sha256}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": dict(parameters),
                "internalParameters": {"python": platform.python_version(), "machine": platform.machine()},
                "resolvedDependencies": [{"uri": source_url(commit), "digest": {"gitCommit": commit.id}}],
            },
            "runDetails": {
                "builder": {"id": os.environ.get("QUIRE_BUILDER_ID", BUILD_TYPE)},
                "metadata": {
                    "invocationId": os.environ.get("QUIRE_BUILD_ID", f"{commit.id}-{started:%Y%m%dT%H%M%SZ}"),
                    "startedOn": f"{started:%Y-%m-%dT%H:%M:%SZ}",
                    "finishedOn": f"{finished:%Y-%m-%dT%H:%M:%SZ}",
                },
            },
        },
    }
    return json.dumps(statement, indent=2)


def release_wheel(out: Path, commit: Commit) -> Path:
    """Build the wheel, its SBOM and its provenance; return the wheel."""
    started = datetime.now(UTC)
    # hatchling gives this time to all files of the wheel.
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(int(commit.time.timestamp()))}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "wheel", "--quiet", "--no-deps", f"--wheel-dir={out}", str(ROOT)]
    subprocess.run(command, check=True, env=environment)
    [wheel] = out.glob("quire_llm-*.whl")
    report = _run(*pip, "install", "--quiet", "--dry-run", "--ignore-installed", "--report=-", f"{wheel}[{EXTRA}]")
    version = wheel.name.split("-")[1]
    subject = _component(ComponentType.APPLICATION, PackageURL("pypi", None, "quire-llm", version), _sha256(wheel))
    packages = reported_packages(json.loads(report))
    _write(wheel, sbom(subject, packages, commit.time), commit, {"artifact": "wheel", "extra": EXTRA}, started)
    return wheel


def build_commands(
    name: str, manifest: str, platforms: str, archive: Path, commit: Commit, base: Base | None = None
) -> list[list[str]]:
    """Return the commands that build an image for several platforms and write it to an archive.

    `base` replaces the base image of the Dockerfiles. An image under localhost/ is never pulled.
    """
    options = [f"--manifest={manifest}", f"--timestamp={int(commit.time.timestamp())}", *IMAGES[name]]
    if base is not None:
        options += [f"--build-arg=PYTHON_IMAGE={base.name}", *(f"--volume={volume}" for volume in base.volumes)]
        options += ["--pull-never"] if base.name.startswith("localhost/") else []
    machine = platform.machine()
    own = f"linux/{images.ARCHITECTURES.get(machine, machine)}"
    builds = []
    # One platform at a time, because buildah 1.28 knows these two arguments in a FROM only if they are given.
    for each in platforms.split(","):
        arguments = [f"--build-arg=BUILDPLATFORM={own}", f"--build-arg=TARGETPLATFORM={each}"]
        builds.append(["buildah", "build", f"--platform={each}", *arguments, *options, str(ROOT)])
    return [*builds, ["buildah", "manifest", "push", "--all", manifest, f"oci-archive:{archive}"]]


def archived_images(archive: Path) -> dict[str, str]:
    """Return the digest of the image of each architecture in an OCI archive, as 64 hexadecimal digits.

    buildah compresses the layers when it writes them, so that these digests are not those of its own storage.
    """
    with tarfile.open(archive) as content:

        def read(name: str) -> Any:
            member = content.extractfile(name)
            assert member is not None, name
            return json.load(member)

        [index] = read("index.json")["manifests"]
        entries = read(f"blobs/sha256/{index['digest'].removeprefix('sha256:')}")["manifests"]
    return {entry["platform"]["architecture"]: entry["digest"].removeprefix("sha256:") for entry in entries}


def release_image(name: str, prefix: str, platforms: str, out: Path, commit: Commit, base: Base | None = None) -> Path:
    """Build an image for several platforms, its SBOMs and its provenance; return its archive.

    Another platform than this machine's needs its emulator (Debian: apt-get install qemu-user-static).
    """
    started, manifest = datetime.now(UTC), f"{prefix}/{name}:{commit.id[:12]}"
    archive = out / f"{name}-{commit.id[:12]}.oci.tar"
    # buildah adds to a list of an earlier build.
    subprocess.run(["buildah", "manifest", "rm", manifest], check=False, capture_output=True)
    environment = dict(os.environ)
    if not any(map(shutil.which, ("runc", "crun"))):
        environment.setdefault("BUILDAH_ISOLATION", "chroot")
    for command in build_commands(name, manifest, platforms, archive, commit, base):
        if code := subprocess.run(command, env=environment, check=False).returncode:
            raise SystemExit(f"release: {' '.join(command[:3])} failed with {code}; see its last lines")
    parameters = {"artifact": name, "platforms": platforms} | ({} if base is None else {"python_image": base.name})
    for architecture, digest in archived_images(archive).items():
        container = _run("buildah", "from", "--pull-never", f"--arch={architecture}", manifest)
        try:
            packages = installed_packages(Path(_run("buildah", "mount", container)))
        finally:
            _run("buildah", "rm", container)
        url = PackageURL("oci", None, name, f"sha256:{digest}", {"arch": architecture, "repository_url": prefix})
        text = sbom(_component(ComponentType.CONTAINER, url, digest), packages, commit.time)
        (out / f"{archive.name}.{architecture}.cdx.json").write_text(text)
    _write(archive, "", commit, parameters, started)
    return archive


def main() -> int:
    """Build a release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for the files (default: dist)")
    parser.add_argument("--images", metavar="PREFIX", help="also build the images, for this registry and organization")
    parser.add_argument("--platform", default=PLATFORMS, help=f"platforms of the images (default: {PLATFORMS})")
    parser.add_argument("--image", choices=IMAGES, action="append", help="build only this image (repeatable)")
    bases = parser.add_mutually_exclusive_group()
    bases.add_argument("--python-image", default="", metavar="IMAGE", help="replace the Dockerfiles' base image")
    bases.add_argument(
        "--debian", action="store_true", help="make the base image from Debian's packages (root on Debian)"
    )
    options = parser.parse_args()
    commit = Commit.current()
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.iterdir()):
        raise SystemExit(f"release: {options.out} is not empty; remove it, or give another folder with --out")
    base = Base(options.python_image) if options.python_image else None
    if options.images and options.debian:
        architectures = [each.split("/")[1] for each in options.platform.split(",")]
        try:
            volumes = images.build_bases(DEBIAN_BASE, architectures, lambda text: print(f"release: {text}", flush=True))
        except binaries.ClusterError as error:
            raise SystemExit(f"release: {error}") from None
        base = Base(DEBIAN_BASE, volumes)
    print(release_wheel(options.out, commit))
    for name in (options.image or IMAGES) if options.images else ():
        print(release_image(name, options.images, options.platform, options.out, commit, base))
    return 0


def _component(kind: ComponentType, url: PackageURL, sha256: str) -> Component:
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=sha256)]
    return Component(type=kind, name=url.name, version=url.version, purl=url, bom_ref=str(url), hashes=hashes)


def _write(file: Path, text: str, commit: Commit, parameters: Mapping[str, Any], started: datetime) -> None:
    """Write the SBOM of a file, if there is only one, and its provenance beside it."""
    if text:
        file.with_name(f"{file.name}.cdx.json").write_text(text)
    statement = provenance(file.name, _sha256(file), commit, parameters, started, datetime.now(UTC))
    file.with_name(f"{file.name}.intoto.json").write_text(statement)


def _required_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return normalized(match[0]) if match else ""


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
