# SPDX-License-Identifier: Apache-2.0
"""Where models are on this machine: local folders, the cache of the hub, and the cache of buckets and web servers."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants as hub_constants

from quire_operator.cli.local_sources import LocalSources
from quire_spec.dataclass_json import to_json
from quire_spec.documents.sources import HuggingFaceSource, Source


@dataclass(frozen=True, slots=True)
class Place:
    """Where the model of a source is, or will be."""

    folder: Path
    """Folder with the model. For a repository of the hub, it is the cache of huggingface_hub until the model is
    complete."""
    is_complete: bool
    """Whether the model is there. Otherwise, it must be downloaded."""
    option: str
    """Option that selects another folder."""


def place_of(
    source: Source,
    local_sources: LocalSources,
    cache_dir: Path,
    environment: Mapping[str, str],
    streams_weights: bool = False,
) -> Place:
    """Return where the model of a source is.

    If `streams_weights` is true, the weights of a bucket stay there, so the folder contains only the other files.
    """
    if source.huggingFace is not None:
        cache = Path(environment.get("HF_HUB_CACHE") or hub_constants.HF_HUB_CACHE)
        snapshot = _cached_snapshot(source.huggingFace, cache)
        return Place(snapshot or cache, snapshot is not None, "--download-dir")
    if (folder := local_sources.resolve(source)) is not None:
        return Place(folder, True, "MODEL")
    folder = _folder_of_url(source, cache_dir)
    if streams_weights and source.s3 is not None:
        folder = folder.with_name(f"{folder.name}-streamed")
    return Place(folder, folder.is_dir(), "--cache-dir")


def _folder_of_url(source: Source, cache_dir: Path) -> Path:
    """Return the folder of the cache for a model in a bucket or on a web server. Its name depends on what is read, and
    not on the Secret."""
    place = {
        name: value
        for name, value in to_json(source.bucket or source.oci or source.http).items()
        if not name.endswith("SecretRef")
    }
    digest = hashlib.sha256(json.dumps(place, sort_keys=True).encode()).hexdigest()
    return cache_dir / "models" / digest[:16]


def _cached_snapshot(hub: HuggingFaceSource, cache: Path) -> Path | None:
    """Return the folder of a complete snapshot in the cache of huggingface_hub; None if there is none."""
    repository, revision = cache / f"models--{hub.repo.replace('/', '--')}", hub.revision or "main"
    with contextlib.suppress(OSError):
        revision = (repository / "refs" / revision).read_text().strip()
    snapshot = repository / "snapshots" / revision
    is_complete = (snapshot / "config.json").exists() and not any((repository / "blobs").glob("*.incomplete"))
    return snapshot if is_complete else None
