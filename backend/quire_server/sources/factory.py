# SPDX-License-Identifier: Apache-2.0
"""From a source of the catalogue to the Place that reads it, with the Secrets that it names. Called by the fetcher and
by the model's download."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from quire_server.sources.http_reader import HttpSourceReader
from quire_server.sources.hub_reader import HubReader
from quire_server.sources.mounted_secrets import MountedSecrets
from quire_server.sources.reader import FolderReader, SourceReader
from quire_server.sources.s3_reader import S3SourceReader
from quire_spec.documents.adapter_catalog import HttpSource, HuggingFaceSource, PvcSource, S3Source, SecretRef, Source
from quire_spec.errors import InvalidArgument
from quire_spec.net.s3 import CREDENTIAL_KEYS


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What sources may name on this machine."""

    secrets_dir: Path | None = None
    """Where Secrets are mounted; None: sources cannot name any."""
    pvcs: Mapping[str, Path] = field(default_factory=dict)
    """Folder that each claim is mounted at."""
    allow_paths: bool = False
    """Take `path` sources: true for a person's own machine, never for a pod."""
    max_weights_bytes: int = 4 * 2**30
    """A rank 64 adapter of a 70B model has 3.3 GiB."""
    max_config_bytes: int = 2**20
    hub_endpoint: str | None = None
    """None is huggingface_hub's own, which HF_ENDPOINT sets."""


def concurrency_key(source: Source) -> str:
    """Who has the files of a source: sources of one place hang together."""
    match source:
        case Source(s3=S3Source() as s3):
            return s3.endpoint or "s3"
        case Source(http=HttpSource() as http):
            try:
                return urlsplit(http.url).netloc.rpartition("@")[2]
            except ValueError:
                # Whoever reads it says that it is no URL.
                return http.url
        case Source(pvc=PvcSource() as pvc):
            return pvc.claimName
    return "path" if source.path is not None else "hub"


class SourceFactory:
    """What sources mean on this machine. Use it as an async context manager."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._secrets = MountedSecrets(options.secrets_dir)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # No cookies: what one source was let in by would let in the next of the same host, and a place could give them
        # without end. Nor the environment: http_place.py reads which proxy leads where, and a .netrc is no Secret.
        self._session = aiohttp.ClientSession(auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def open_reader(self, source: Source) -> SourceReader:
        """Where the files of `source` are read from; raises InvalidArgument for one that this machine does not take."""
        match source:
            case Source(huggingFace=HuggingFaceSource() as hub):
                return HubReader(
                    self._open_session(), hub.repo, hub.revision, lambda: self._token(hub), self._options.hub_endpoint
                )
            case Source(s3=S3Source() as s3):
                return S3SourceReader(
                    self._open_session(),
                    s3.uri,
                    s3.endpoint,
                    s3.region,
                    lambda: self._s3_credentials(s3.credentialsSecretRef),
                )
            case Source(http=HttpSource() as http):
                return HttpSourceReader(self._open_session(), http.url, http.sha256, lambda: self._headers(http))
            case Source(pvc=PvcSource() as pvc):
                return self._pvc_reader(pvc)
            case Source(path=str() as path):
                return self._path_reader(path)
        raise InvalidArgument("source: none is given")

    def secret_version(self, source: Source) -> int:
        """Another number once the Secret of a source holds something else; raises InvalidArgument as `place` does."""
        return 0 if source.secret_ref is None else self._secrets.version(source.secret_ref)

    def _pvc_reader(self, pvc: PvcSource) -> SourceReader:
        root = self._options.pvcs.get(pvc.claimName)
        if root is None:
            mounted_claims = ", ".join(sorted(self._options.pvcs)) or "none"
            raise InvalidArgument(
                f"pvc {pvc.claimName!r}: not mounted here (mounted: {mounted_claims}); give --pvc "
                f"{pvc.claimName}=FOLDER"
            )
        return FolderReader(root, pvc.path, f"pvc {pvc.claimName!r}")

    def _path_reader(self, path: str) -> SourceReader:
        if not self._options.allow_paths:
            raise InvalidArgument(f"path {path!r}: folders of this machine are for `quire serve`; use another source")
        if not Path(path).is_absolute() or ".." in Path(path).parts:
            raise InvalidArgument(f"path {path!r}: must be absolute, without '..'")
        return FolderReader(Path(path), "", f"path {path!r}")

    def _open_session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "SourceFactory is an async context manager"
        return self._session

    def _token(self, hub: HuggingFaceSource) -> str | None:
        ref = hub.tokenSecretRef
        return None if ref is None else self._secrets.value(ref, ref.key or "token")

    def _headers(self, http: HttpSource) -> dict[str, str]:
        return {} if http.headersSecretRef is None else self._secrets.items(http.headersSecretRef)

    def _s3_credentials(self, secret: SecretRef | None) -> dict[str, str]:
        if secret is None:
            return {}
        *needed, token = CREDENTIAL_KEYS
        keys = needed + [token] * self._secrets.has_key(secret, token)
        return {key: self._secrets.value(secret, key) for key in keys}
