# SPDX-License-Identifier: Apache-2.0
"""Reads an artifact in an OCI registry, whose layers are the files: what `oras push` and the ModelPack tools write.

Sources: OCI distribution specification 1.1; ORAS (annotation org.opencontainers.image.title); CNCF ModelPack
(annotation org.cncf.model.filepath).
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from quire_sources.http.client import HttpClient, range_headers
from quire_sources.http.errors import error_from_status
from quire_sources.reader import FileMissing, OpenFile
from quire_spec.documents.sources import OciSource
from quire_spec.errors import AccessDenied, ConfigError, NotFound, Unavailable

_REFERENCE = re.compile(
    r"(?P<registry>[a-zA-Z0-9][a-zA-Z0-9.-]*(?::[0-9]{1,5})?)"
    r"/(?P<repository>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[\w][\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
_ACCEPT = ", ".join((_MANIFEST, _INDEX, "application/vnd.docker.distribution.manifest.v2+json", _DOCKER_INDEX))
_NAME_ANNOTATIONS = ("org.opencontainers.image.title", "org.cncf.model.filepath")
_MAX_MANIFEST_BYTES = 2**22
"""Registries accept manifests of up to 4 MiB."""
_MAX_TOKEN_BYTES = 2**17
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_DOCKER_HUB = ("docker.io", "index.docker.io")
_DOCKER_HUB_REGISTRY = "registry-1.docker.io"


@dataclass(frozen=True, slots=True)
class _Blob:
    """A file of the artifact."""

    digest: str
    size: int
    """Bytes."""
    media_type: str


class OciReader:
    """Reads the files of one artifact. The tag is resolved to a manifest only once, so that all files belong to the
    same manifest."""

    def __init__(
        self, client: HttpClient, source: OciSource, docker_config: Callable[[], Mapping[str, Any] | None]
    ) -> None:
        """`docker_config` returns the parsed .dockerconfigjson of the source's Secret; None if there is no Secret.

        Raises:
            ConfigError: the reference is not REGISTRY/REPOSITORY[:TAG][@DIGEST].
        """
        match = _REFERENCE.fullmatch(source.reference)
        if match is None:
            raise ConfigError("oci source: the reference must be registry/repository[:tag][@sha256:digest]; correct it")
        self._client, self._docker_config = client, docker_config
        self._registry, self._repository = match["registry"], match["repository"]
        self._requested = match["digest"] or match["tag"] or "latest"
        self.is_immutable = match["digest"] is not None
        host = _DOCKER_HUB_REGISTRY if self._registry in _DOCKER_HUB else self._registry
        self._root = URL(f"{'http' if source.insecure else 'https'}://{host}/v2/{self._repository}/")
        self._blobs: dict[str, _Blob] | None = None
        self._digest: str | None = None
        self._authorization: dict[str, str] = {}

    @property
    def revision(self) -> str | None:
        return self._digest

    def display_name(self, name: str) -> str:
        separator = "@" if self._requested.startswith("sha256:") else ":"
        artifact = f"oci://{self._registry}/{self._repository}{separator}{self._requested}"
        return f"{artifact}, {name}" if name else artifact

    def expected_sha256(self, name: str) -> str | None:
        blob = (self._blobs or {}).get(name)
        return None if blob is None else blob.digest.removeprefix("sha256:")

    async def version(self, name: str) -> str | None:
        return (await self._blob(name)).digest

    @asynccontextmanager
    async def open(
        self, name: str, start: int = 0, version: str | None = None, num_bytes: int | None = None
    ) -> AsyncIterator[OpenFile]:
        blob = await self._blob(name)
        # A blob never changes, so a request for a range needs no condition.
        headers = range_headers(start if version in (None, blob.digest) else 0, None, num_bytes)
        url, display_name = self._root / "blobs" / blob.digest, self.display_name(name)
        async with AsyncExitStack() as stack:
            try:
                try:
                    file = await stack.enter_async_context(
                        self._client.open(url, self._authorization, headers, display_name)
                    )
                except AccessDenied:
                    # Tokens expire after minutes, in long downloads. The request for the manifest gets a new one.
                    await self._manifest(self._digest or self._requested)
                    file = await stack.enter_async_context(
                        self._client.open(url, self._authorization, headers, display_name)
                    )
            except NotFound as error:
                # The manifest lists the file. If NotFound was raised, the caller would leave out an optional file.
                raise Unavailable(str(error)) from error
            yield OpenFile(file.start, blob.size, blob.digest, file.chunks)

    async def _blob(self, name: str) -> _Blob:
        if self._blobs is None:
            manifest = await self._manifest(self._requested)
            if manifest.get("mediaType") in (_INDEX, _DOCKER_INDEX) or "manifests" in manifest:
                manifest = await self._manifest(self._only_manifest(manifest))
            self._blobs = self._files(manifest)
        try:
            blob = self._blobs[name]
        except KeyError as error:
            raise FileMissing(
                f"{self.display_name(name)}: no such file in the artifact; push each file as a layer, and store "
                "weights as safetensors"
            ) from error
        if "tar" in blob.media_type.rpartition(".")[2] or "gzip" in blob.media_type:
            raise ConfigError(
                f"{self.display_name(name)}: its layer is an archive ({blob.media_type}); push the file itself, as "
                "`oras push` does"
            )
        return blob

    def _only_manifest(self, index: Mapping[str, Any]) -> str:
        """Return the digest of the only manifest in an index."""
        entries = index.get("manifests")
        digests = (
            [entry.get("digest") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        )
        if len(digests) != 1 or not isinstance(digests[0], str):
            raise ConfigError(
                f"{self.display_name('')}: is an index of {len(digests)} manifests; give the digest of one of them"
            )
        return digests[0]

    def _files(self, manifest: Mapping[str, Any]) -> dict[str, _Blob]:
        """Return the files of an artifact by their names. A common folder is not part of the names."""
        files: dict[str, _Blob] = {}
        layers = manifest.get("layers")
        for layer in layers if isinstance(layers, list) else ():
            match layer:
                case {"digest": str(digest), "size": int(size), "annotations": {**annotations}}:
                    name = next((str(annotations[key]) for key in _NAME_ANNOTATIONS if key in annotations), None)
                    if name and re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
                        files[name.removeprefix("./")] = _Blob(digest, size, str(layer.get("mediaType", "")))
        if not files:
            raise ConfigError(
                f"{self.display_name('')}: none of its layers is a named file, as in the image of a container; "
                "push the files with `oras push`"
            )
        folders = {name.rpartition("/")[0] for name in files}
        return {name.rpartition("/")[2]: blob for name, blob in files.items()} if len(folders) == 1 else files

    async def _manifest(self, reference: str) -> dict[str, Any]:
        """Return a manifest or an index, after its digest has been checked."""
        display_name = self.display_name("")
        body = await self._get(self._root / "manifests" / reference, {"Accept": _ACCEPT}, display_name)
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if reference.startswith("sha256:") and reference != digest:
            raise Unavailable(f"{display_name}: the registry sent a manifest with the digest {digest}")
        self._digest = digest
        try:
            manifest = json.loads(body)
        except ValueError:
            manifest = None
        if not isinstance(manifest, dict):
            raise Unavailable(f"{display_name}: the registry sent no manifest; check the address")
        return manifest

    async def _get(self, url: URL, headers: Mapping[str, str], display_name: str) -> bytes:
        """Send a GET request. If the registry asks for credentials, get them and send it once more."""
        for is_retry in (False, True):
            async with self._client.request("GET", url, self._authorization, headers, display_name) as response:
                if response.status == 401 and not is_retry:
                    challenge = response.headers.get("WWW-Authenticate", "")
                else:
                    if response.status == 404:
                        raise NotFound(f"{display_name}: no such artifact; check the repository and the tag")
                    if response.status != 200:
                        raise error_from_status(display_name, response.status, response.headers)
                    return await _read(response, _MAX_MANIFEST_BYTES, display_name)
            self._authorization = await self._authorize(challenge, display_name)
        raise AssertionError("the second request returns or raises")

    async def _authorize(self, challenge: str, display_name: str) -> dict[str, str]:
        """Return the header that the registry asks for: a token of its token server, or user and password."""
        basic = self._basic_credentials()
        scheme, _, parameters = challenge.partition(" ")
        if scheme.lower() == "basic":
            return basic
        fields = dict(_CHALLENGE.findall(parameters))
        try:
            realm = URL(fields.get("realm", ""))
            is_valid = scheme.lower() == "bearer" and realm.scheme in ("http", "https") and bool(realm.host)
        except ValueError:
            is_valid = False
        if not is_valid or (realm.scheme == "http" and self._root.scheme == "https"):
            raise Unavailable(f"{display_name}: the registry asks for credentials in an unknown way; check the address")
        query = {name: fields[name] for name in ("service", "scope") if name in fields}
        async with self._client.request("GET", realm.update_query(query), basic, {}, display_name) as response:
            if response.status != 200:
                raise error_from_status(display_name, response.status, response.headers)
            body = await _read(response, _MAX_TOKEN_BYTES, display_name)
        try:
            answer = json.loads(body)
            token = str(answer.get("token") or answer["access_token"])
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise Unavailable(f"{display_name}: the token server of the registry sent no token") from error
        if not (token.isascii() and token.isprintable()):
            raise Unavailable(f"{display_name}: the token server of the registry sent no valid token")
        return {"Authorization": f"Bearer {token}"}

    def _basic_credentials(self) -> dict[str, str]:
        """Return the header with the user and password of the registry in the Secret; empty if there is none."""
        config = self._docker_config()
        auths = config.get("auths") if config else None
        if not isinstance(auths, dict):
            return {}
        hosts = [_host(key) for key in auths]
        names = _DOCKER_HUB if self._registry in _DOCKER_HUB else (self._registry,)
        entry = next((value for value, host in zip(auths.values(), hosts, strict=True) if host in names), None)
        if not isinstance(entry, dict):
            return {}
        if isinstance(encoded := entry.get("auth"), str) and encoded:
            try:
                user_password = base64.b64decode(encoded, validate=True)
            except binascii.Error as error:
                raise AccessDenied(
                    f"{self.display_name('')}: `auth` in its Secret is not base64; create it again"
                ) from error
        else:
            user_password = f"{entry.get('username', '')}:{entry.get('password', '')}".encode()
        return {"Authorization": f"Basic {base64.b64encode(user_password).decode()}"}


def _host(key: str) -> str:
    """Return the registry of a key of `auths`, such as https://index.docker.io/v1/ or ghcr.io."""
    return key.removeprefix("https://").removeprefix("http://").partition("/")[0]


async def _read(response: aiohttp.ClientResponse, max_bytes: int, display_name: str) -> bytes:
    """Return the body of a response. Raises Unavailable if it is cut or too large."""
    try:
        body = await response.content.read(max_bytes + 1)
        while len(body) <= max_bytes and (more := await response.content.read(max_bytes + 1 - len(body))):
            body += more
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Unavailable(f"{display_name}: the connection was cut") from error
    if len(body) > max_bytes:
        raise Unavailable(f"{display_name}: the registry sent more than {max_bytes} bytes")
    return body
