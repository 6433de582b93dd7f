# SPDX-License-Identifier: Apache-2.0
"""Writes images with one layer to OCI archives. This needs neither a registry nor a builder."""

import hashlib
import io
import json
import platform
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PAUSE_IMAGE = "localhost/pause:1"
BUSYBOX_IMAGE = "localhost/busybox:1"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_MEDIA = "application/vnd.oci.image"


def write_pause_archive(file: Path) -> Path:
    """Write the pause image. It contains the busybox-static of this machine."""
    return _write_busybox_based(file, PAUSE_IMAGE, ["/bin/busybox", "sleep", "2147483647"])


def write_busybox_archive(file: Path) -> Path:
    """Write an image that contains a shell. Tests use this image."""
    return _write_busybox_based(file, BUSYBOX_IMAGE, ["/bin/busybox", "sh"])


def write_archive(file: Path, name: str, files: Mapping[str, bytes], entrypoint: Sequence[str]) -> Path:
    """Write the image `name` to an archive. `files` maps paths in the image to the content of executable files."""
    layer = _tar({path: (content, 0o755) for path, content in files.items()})
    config = _json(
        {
            "architecture": _MACHINES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Entrypoint": [*entrypoint], "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "config": _descriptor(f"{_MEDIA}.config.v1+json", config),
            "layers": [_descriptor(f"{_MEDIA}.layer.v1.tar", layer)],
        }
    )
    entry = _descriptor(f"{_MEDIA}.manifest.v1+json", manifest)
    entry["annotations"] = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    content = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json({"schemaVersion": 2, "manifests": [entry]}),
        **{f"blobs/sha256/{_digest(blob)[7:]}": blob for blob in (config, manifest, layer)},
    }
    file.write_bytes(_tar({path: (data, 0o644) for path, data in content.items()}))
    return file


def _write_busybox_based(file: Path, name: str, entrypoint: list[str]) -> Path:
    program = shutil.which("busybox")
    if program is None:
        raise FileNotFoundError("busybox is not installed; install Debian's busybox-static")
    return write_archive(file, name, {"bin/busybox": Path(program).read_bytes()}, entrypoint)


def _tar(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, (content, mode) in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def _descriptor(media: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _json(document: object) -> bytes:
    return json.dumps(document).encode()
