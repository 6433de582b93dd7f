# SPDX-License-Identifier: Apache-2.0
"""Creates the readers of sources. Each reader gets the Secret that its source refers to. All readers of one factory
share an HTTP session.

The adapter fetcher, the model download and the planner's checkpoint reader call this module.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import aiohttp
from huggingface_hub import constants as hub_constants
from yarl import URL

from quire_sources.buckets.bucket_reader import BucketReader
from quire_sources.credentials import SecretValues, bucket_credentials, docker_config, http_headers, hub_token
from quire_sources.http.borders import Borders
from quire_sources.http.client import HttpClient, create_session
from quire_sources.mounted_secrets import MountedSecrets
from quire_sources.reader import SourceReader
from quire_sources.readers.folder_reader import FolderReader
from quire_sources.readers.http_reader import HttpReader
from quire_sources.readers.hub_reader import HubReader
from quire_sources.readers.oci_reader import OciReader
from quire_spec.documents.sources import (
    SOURCE_KINDS,
    AzureSource,
    GcsSource,
    HttpSource,
    HuggingFaceSource,
    ImageSource,
    OciSource,
    PvcSource,
    S3Source,
    Source,
    name_list,
)
from quire_spec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The Secrets, claims and local folders of this machine that sources are allowed to use."""

    secrets_dir: Path | None = None
    """Folder that contains the mounted Secrets. None: sources cannot use Secrets."""
    pvcs: Mapping[str, Path] = field(default_factory=dict)
    """Maps the name of a claim to its mount path."""
    allow_paths: bool = False
    """True if `path` sources are allowed. This is the case on a developer's machine, but never in a pod."""
    link_root: Path | None = None
    """Folder that contains the `pvc` or `path` sources, and out of which no link may lead. None: the root of the claim,
    or the folder of the source itself."""
    hub_endpoint: str | None = None
    """URL of the hub; None: the default of huggingface_hub, which HF_ENDPOINT sets."""
    borders: Borders | None = None
    """Addresses to which the readers connect; None: all. A process that reads the URLs of other people has borders."""


def concurrency_key(source: Source) -> str:
    """Return the name of the host or volume from which a source is read. There is one limit for all reads from the same
    host, because a host that hangs blocks all of them."""
    match source:
        case Source(bucket=AzureSource() as azure):
            return azure.endpoint or f"azure {azure.account}"
        case Source(bucket=(S3Source() | GcsSource()) as bucket):
            return bucket.endpoint or source.kind_name
        case Source(oci=OciSource() as oci):
            return oci.reference.partition("/")[0]
        case Source(http=HttpSource() as http):
            try:
                return urlsplit(http.url).netloc.rpartition("@")[2]
            except ValueError:
                # The reader reports that the URL is not valid.
                return http.url
        case Source(pvc=PvcSource() as pvc):
            return pvc.claimName
    return "path" if source.path is not None else "hub"


class SourceFactory(AsyncExitStack):
    """Opens source readers. A SourceFactory is used as an async context manager."""

    def __init__(self, options: SourceOptions, read_secret: SecretValues | None = None) -> None:
        """If `read_secret` is None, Secrets are read from `options.secrets_dir`."""
        super().__init__()
        self._options = options
        self._mounted_secrets = MountedSecrets(options.secrets_dir)
        self._read_secret = read_secret or self._mounted_secrets.values
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = await self.enter_async_context(create_session(self._options.borders))
        return self

    def open_reader(self, source: Source) -> SourceReader:
        """Return the reader of `source`; raises ConfigError if the source is invalid or not allowed."""
        assert self._session is not None, "SourceFactory is an async context manager"
        borders = self._options.borders
        match source:
            case Source(huggingFace=HuggingFaceSource() as hub):
                endpoint = self._options.hub_endpoint
                client = HttpClient(self._session, borders, URL(endpoint or hub_constants.ENDPOINT))
                return HubReader(client, hub, partial(hub_token, hub, self._read_secret), endpoint)
            case Source(bucket=(S3Source() | GcsSource() | AzureSource()) as bucket):
                return BucketReader(
                    self._session, bucket, partial(bucket_credentials, bucket, self._read_secret), borders
                )
            case Source(oci=OciSource() as oci):
                config = partial(docker_config, oci, self._read_secret)
                return OciReader(HttpClient(self._session, borders), oci, config)
            case Source(http=HttpSource() as http):
                return HttpReader(
                    HttpClient(self._session, borders), http, partial(http_headers, http, self._read_secret)
                )
            case Source(pvc=PvcSource() as pvc):
                return self._pvc_reader(pvc)
            case Source(path=str() as path):
                return self._path_reader(path)
            case Source(image=ImageSource() as image):
                raise ConfigError(
                    f"image {image.reference!r}: only pods of a cluster mount it, and only for a model; use oci for an "
                    "adapter, and a path on this machine"
                )
        raise ConfigError(f"source: is empty; give one of {name_list(SOURCE_KINDS)}")

    def secret_version(self, source: Source) -> int:
        """Return a number that changes when the content of the source's mounted Secret changes. Raises ConfigError like
        `open_reader`."""
        return 0 if source.secret_ref is None else self._mounted_secrets.version(source.secret_ref)

    def _pvc_reader(self, pvc: PvcSource) -> SourceReader:
        root = self._options.pvcs.get(pvc.claimName)
        if root is None:
            mounted_claims = ", ".join(sorted(self._options.pvcs)) or "none"
            raise ConfigError(
                f"pvc {pvc.claimName!r}: not mounted here (mounted: {mounted_claims}); give --pvc "
                f"{pvc.claimName}=FOLDER"
            )
        return self._folder_reader(root, pvc.path, f"pvc {pvc.claimName!r}")

    def _path_reader(self, path: str) -> SourceReader:
        if not self._options.allow_paths:
            raise ConfigError(f"path {path!r}: a local folder can be used only with `quire serve`; use another source")
        if not Path(path).is_absolute() or ".." in Path(path).parts:
            raise ConfigError(f"path {path!r}: must be absolute, without '..'")
        root = _snapshot_root(Path(path))
        return self._folder_reader(root, str(Path(path).relative_to(root)), f"path {path!r}")

    def _folder_reader(self, root: Path, path: str, source_name: str) -> FolderReader:
        link_root, folder = self._options.link_root, root / path
        if link_root is not None and folder.is_relative_to(link_root):
            root, path = link_root, str(folder.relative_to(link_root))
        return FolderReader(root, path, source_name)


def _snapshot_root(folder: Path) -> Path:
    """Return the folder that the links in `folder` may lead to.

    In huggingface_hub's cache, the files of models--ORG--NAME/snapshots/REVISION are links to models--ORG--NAME/blobs.
    """
    for parent in folder.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return parent.parent
    return folder
