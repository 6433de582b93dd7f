# SPDX-License-Identifier: Apache-2.0
"""Builds the images of this checkout from its Dockerfiles. It uses buildah and needs neither a registry nor Docker.

The base image of the Dockerfiles is Python on Debian. mmdebstrap creates it from the mirror that apt uses. The base
image also gets the configuration of this machine's pip, and the same for uv: the index, the folders with wheels, the
certificates, and a build of torch without CUDA's libraries (nvidia_stubs.py). The Dockerfiles themselves are not
changed. Layers are cached, so a second build is incremental. When the disk is nearly full, the layers that are not part
of a current image are removed.
"""

import contextlib
import fcntl
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import bootstrap
import nvidia_stubs

from nodocker_cluster import binaries, debian

ROOT = Path(__file__).resolve().parents[2]
OPERATOR_IMAGE = "localhost/quire-operator:e2e"
SERVER_IMAGE = "localhost/quire:e2e"
_BUILDS = {
    OPERATOR_IMAGE: ["--file=operator/Dockerfile"],
    SERVER_IMAGE: ["--file=backend/Dockerfile", "--target=cpu"],
}
PACKAGES = {"buildah": "buildah", "mmdebstrap": "mmdebstrap"}
_BASE_PACKAGES = (
    "ca-certificates", "python3", "python3-pip", "python3-venv", "python-is-python3", "libpython3.11",
)  # fmt: skip
_DIGITS = 12
"""The name of an image's archive contains this number of digits of the image's digest."""
NEEDED_BYTES = 15 * 10**9
"""Space for a build of both images and for the node that runs them. The images and their archives take 6 GB, the node's
copy takes 6 GB, and a build needs 2 GB more."""
_MIN_FREE_BYTES = 10 * 2**30
"""Minimum free space. If less space is free, the layers that are not part of a current image are removed. The next
build creates them again if it needs them."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Debian's name of each architecture that `platform.machine` returns."""
_UV_KEYS = {
    "index-url": "index-url",
    "extra-index-url": "extra-index-url",
    "find-links": "find-links",
    "trusted-host": "allow-insecure-host",
}
"""Settings of pip that uv has too, and their names there."""
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class PipConfig:
    """The configuration of pip and uv in the base image."""

    pip_conf: str
    """Content of pip.conf."""
    uv_toml: str
    """Content of uv.toml, with the same index, folders and constraints."""
    constraints: str
    volumes: tuple[str, ...]
    """The folders of this machine to which the configuration refers, in the form of buildah's option --volume."""


def build(report_progress: binaries.ProgressCallback) -> list[Path]:
    """Build both images and return their archives, for Node.load.

    Raises:
        Unavailable: this is not Debian, not root, or a build failed; the message names the log.
    """
    debian.install_packages(PACKAGES, report_progress)
    folder = binaries.cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    binaries.require_space(folder, NEEDED_BYTES, "make e2e")
    with _build_lock(folder, report_progress):
        return _build_images(_Buildah(folder, report_progress), pip_config(), report_progress)


@contextlib.contextmanager
def _build_lock(folder: Path, report_progress: binaries.ProgressCallback) -> Iterator[None]:
    """Allow only one build at a time. Otherwise, a build could prune layers that another build uses."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report_progress("waiting for another build of images")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build_images(buildah: "_Buildah", pip: "PipConfig", report_progress: binaries.ProgressCallback) -> list[Path]:
    # A killed build leaves its containers behind. They take space, and rmi --prune fails on the layers that they use.
    buildah.run("rm", "--all")
    base = _build_base_image(buildah, pip)
    if shutil.disk_usage(buildah.folder).free < _MIN_FREE_BYTES:
        report_progress("removing layers of older builds")
        buildah.run("rmi", "--prune")
    archives = []
    for name, flags in _BUILDS.items():
        report_progress(f"building {name}")
        buildah.run(
            "build",
            "--isolation=chroot",
            "--network=host",
            "--layers",
            "--pull-never",
            *(f"--volume={volume}" for volume in pip.volumes),
            f"--build-arg=PYTHON_IMAGE={base}",
            f"--tag={name}",
            *flags,
            str(ROOT),
        )
        archives.append(_write_archive(buildah, name))
    return archives


def build_bases(name: str, architectures: Sequence[str], report_progress: binaries.ProgressCallback) -> tuple[str, ...]:
    """Build a base image for each of Debian's architectures and for this machine's, and combine them in the manifest
    list `name` in buildah's default storage. pip and uv in these images install torch without CUDA's libraries.

    Return the folders that pip reads in these images, in the form of buildah's option --volume.

    Raises:
        Unavailable: this is not Debian, not root, an emulator is missing, or a build failed; the message names the log.
    """
    debian.install_packages(PACKAGES | {"arch-test": "arch-test"}, report_progress)
    folder = binaries.cache_folder() / "bases"
    folder.mkdir(parents=True, exist_ok=True)
    pip = pip_config([machine for machine, name in ARCHITECTURES.items() if name in architectures])
    # The stages that do not depend on the platform run on this machine's.
    architectures = list(dict.fromkeys([*architectures, ARCHITECTURES[platform.machine()]]))
    for architecture in architectures:
        if subprocess.run(["arch-test", architecture], capture_output=True, check=False).returncode:
            raise binaries.Unavailable(
                f"this machine runs no programs for {architecture}; run apt-get install qemu-user-static, and register "
                "it with binfmt_misc (systemctl restart systemd-binfmt)"
            )
    with _build_lock(folder, report_progress):
        buildah = _Buildah(folder, report_progress, has_own_storage=False)
        bases = [_build_base_image(buildah, pip, architecture) for architecture in architectures]
        if buildah.run("images", "--quiet", "--filter", f"reference={name}"):
            buildah.run("manifest", "rm", name)
        buildah.run("manifest", "create", name, *bases)
    return pip.volumes


def built_archives() -> list[Path]:
    """Return the archives of the last `build`.

    Raises:
        Unavailable: no images have been built.
    """
    folder = binaries.cache_folder() / "images"
    archives = [file for name in _BUILDS for file in folder.glob(f"{_stem(name)}-{'?' * _DIGITS}.tar")]
    if len(archives) < len(_BUILDS):
        raise binaries.Unavailable("the images are not built yet; run make cluster-images")
    return archives


def pip_config(machines: Sequence[str] = (platform.machine(),)) -> PipConfig:
    """Return the pip configuration of this machine in a form that can be used in an image. The folders to which it
    refers become mounts. It selects a build of torch without CUDA's libraries for each of these architectures."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    output = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True).stdout
    copied_keys = {"index-url", "extra-index-url", "find-links", "trusted-host", "timeout", "proxy"}
    settings = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", output, re.MULTILINE))
    constraints = _torch_constraints(pip, settings, machines)
    lines, volumes = ["[global]", "break-system-packages = true", "constraint = /etc/pip-constraints.txt"], []
    uv: dict[str, object] = {"constraint-dependencies": constraints}
    if _CERTIFICATES.exists():
        lines.append(f"cert = {_CERTIFICATES}")
        uv["system-certs"] = True
    for key, value in sorted(settings.items()):
        if key not in copied_keys:
            continue
        words = value.replace("\\n", " ").split()
        for i, word in enumerate(words):
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                # A simple index refers to files next to it, so the folder that contains the index is mounted.
                mounted = path.parent if word.startswith("file://") else path
                mount_path = f"/run/pip/{key}-{i}"
                volumes.append(f"{mounted}:{mount_path}:ro")
                words[i] = word.replace(str(mounted), mount_path)
        lines.append(f"{key} = {' '.join(words)}")
        if key in _UV_KEYS:
            uv[_UV_KEYS[key]] = words[0] if key == "index-url" else words
    uv_lines = (f"{key} = {json.dumps(value)}\n" for key, value in uv.items())  # for these values, JSON is TOML
    return PipConfig("\n".join(lines) + "\n", "".join(uv_lines), "".join(f"{c}\n" for c in constraints), tuple(volumes))


def _torch_constraints(pip: list[str], settings: dict[str, str], machines: Sequence[str]) -> list[str]:
    """Return constraints that select a build of torch without CUDA's libraries for each of the architectures, and add
    its wheels to the settings."""
    if requirement := bootstrap.torch_requirement(pip):
        return [requirement]
    constraints, folders = [], [settings.get("find-links", "")]
    for machine in machines:
        if programs := nvidia_stubs.missing_programs(machine):
            packages = f"{'g++' if 'g++' in programs else f'g++-{machine}-linux-gnu'} binutils"
            raise binaries.Unavailable(f"{' and '.join(programs)}: not installed; run apt-get install {packages}")
        wheels = nvidia_stubs.build_wheels(pip, bootstrap.TORCH, machine)
        folders += [str(wheels), str(wheels / nvidia_stubs.WITHOUT_TRITON)]
        lines = (wheels / nvidia_stubs.WITHOUT_TRITON / nvidia_stubs.CONSTRAINTS).read_text().splitlines()
        constraints += [f"{line}; platform_machine == '{machine}'" for line in lines]
    settings["find-links"] = " ".join(folders).strip()
    return constraints


class _Buildah:
    """Runs buildah with its own storage, which is separate from other builds on this machine."""

    def __init__(
        self, folder: Path, report_progress: binaries.ProgressCallback, *, has_own_storage: bool = True
    ) -> None:
        self.folder, self.report_progress, self.log = folder, report_progress, folder / "build.log"
        self.log.unlink(missing_ok=True)
        # Builds run in a separate mount namespace. Otherwise, a killed build would leave dozens of mounts behind.
        self._argv = ["unshare", "--mount", "--", "buildah"]
        if has_own_storage:
            self._argv += [f"--root={folder}/store", f"--runroot={folder}/run", "--storage-driver=overlay"]

    def run(self, command: str, *arguments: str) -> str:
        """Run a buildah command and return its standard output; its standard error goes to the log."""
        return self.run_logged(f"buildah {command}", [*self._argv, command, *arguments])

    def run_logged(self, description: str, argv: list[str]) -> str:
        """Run a program, write its output to the log, and return the output. If the program fails, raise Unavailable
        with the end of the log."""
        with self.log.open("ab") as log:
            done = subprocess.run(
                argv, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True, check=False
            )
            log.write(done.stdout.encode())
        if done.returncode:
            log_tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise binaries.Unavailable(f"{description} failed; {self.log} ends with:\n{log_tail}")
        return done.stdout.strip()

    def image_id(self, name: str) -> str:
        """Return an image's id in hexadecimal digits; empty if the image does not exist."""
        return self.run("images", "--quiet", "--no-trunc", "--filter", f"reference={name}").removeprefix("sha256:")


def _build_base_image(buildah: _Buildah, pip: PipConfig, architecture: str = "") -> str:
    """Build an image that replaces python:3.11-slim-bookworm, and return its name. `architecture` is one of Debian's,
    by default that of this machine."""
    certificates = _CERTIFICATES.read_bytes() if _CERTIFICATES.exists() else b""
    key = repr((_BASE_PACKAGES, pip.pip_conf, pip.uv_toml, pip.constraints)).encode() + certificates
    name = f"localhost/quire-base:{architecture and architecture + '-'}{hashlib.sha256(key).hexdigest()[:12]}"
    if buildah.image_id(name):
        return name
    buildah.report_progress("making the base image from Debian's packages")
    with tempfile.TemporaryDirectory(dir=buildah.folder) as temporary:
        work = Path(temporary)
        debootstrap = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(_BASE_PACKAGES)}"]
        debootstrap += ["--dpkgopt=force-unsafe-io", *([f"--architectures={architecture}"] if architecture else [])]
        buildah.run_logged("mmdebstrap", [*debootstrap, debian.SUITE, str(work / "base.tar"), debian.mirror()])
        (work / "pip.conf").write_text(pip.pip_conf)
        (work / "uv.toml").write_text(pip.uv_toml)
        (work / "constraints").write_text(pip.constraints)
        container = buildah.run("from", *([f"--arch={architecture}"] if architecture else []), "scratch")
        buildah.run("add", "--quiet", container, str(work / "base.tar"), "/")
        buildah.run("copy", "--quiet", container, str(work / "pip.conf"), "/etc/pip.conf")
        buildah.run("copy", "--quiet", container, str(work / "uv.toml"), "/etc/uv/uv.toml")
        buildah.run("copy", "--quiet", container, str(work / "constraints"), "/etc/pip-constraints.txt")
        if certificates:
            buildah.run("copy", "--quiet", container, str(_CERTIFICATES), str(_CERTIFICATES))
        platform = ["--os=linux", f"--arch={architecture}"] if architecture else []
        buildah.run("config", *platform, f"--env=PATH={_PATH}", container)
        buildah.run("commit", "--quiet", "--rm", container, name)
    return name


def _write_archive(buildah: _Buildah, name: str) -> Path:
    """Write the image to a file if it has changed, and return the file."""
    image_id = buildah.image_id(name)
    stem = _stem(name)
    file = buildah.folder / f"{stem}-{image_id[:_DIGITS]}.tar"
    if not file.exists():
        for stale in buildah.folder.glob(f"{stem}-{'?' * _DIGITS}.tar"):
            stale.unlink()
        partial = file.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        buildah.run("push", "--quiet", name, f"docker-archive:{partial}:{name}")
        partial.rename(file)
    return file


def _stem(name: str) -> str:
    return name.rpartition("/")[2].partition(":")[0]
