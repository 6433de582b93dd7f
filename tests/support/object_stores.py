# SPDX-License-Identifier: Apache-2.0
"""Real servers of files as processes: S3 (Versity's gateway), Google Cloud Storage (fake-gcs-server), Azure Blob
Storage (Azurite), and an OCI registry (the CNCF's Distribution)."""

import base64
import contextlib
import email.utils
import hashlib
import hmac
import json
import os
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import obstore
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from nodocker_cluster import azurite
from nodocker_cluster.controllers import STORES
from nodocker_cluster.ports import free_ports
from obstore.store import AzureStore, S3Store
from support.engine_processes import wait_for

AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = base64.b64encode(b"a key of 64 bytes for the account of the emulator of Azure Blob.").decode()


@contextlib.contextmanager
def running_s3(folder: Path, bucket: str, files: Mapping[str, bytes], key: str, secret: str) -> Iterator[str]:
    """Start an S3 server that has the files in a private bucket, and yield its URL."""
    (port,) = free_ports(1)
    (folder / "data" / bucket).mkdir(parents=True)
    command = [_stores() / "versitygw", "--port", f"127.0.0.1:{port}", "--quiet", "posix", folder / "data"]
    with _running(command, folder, port, ROOT_ACCESS_KEY=key, ROOT_SECRET_KEY=secret):
        url = f"http://127.0.0.1:{port}"
        options = {"access_key_id": key, "secret_access_key": secret, "region": "us-east-1", "endpoint": url}
        store = S3Store(bucket, **options, client_options={"allow_http": True})
        for name, content in files.items():
            obstore.put(store, name, content)
        yield url


@contextlib.contextmanager
def running_gcs(folder: Path, bucket: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Start an emulator of Google Cloud Storage that has the files in a bucket, and yield its URL."""
    (port,) = free_ports(1)
    for name, content in files.items():
        path = folder / "data" / bucket / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    command = [_stores() / "fake-gcs-server", "-scheme=http", "-host=127.0.0.1", f"-port={port}", "-backend=memory"]
    command += [f"-data={folder / 'data'}", f"-public-host=127.0.0.1:{port}"]
    with _running(command, folder, port):
        yield f"http://127.0.0.1:{port}"


def service_account_key() -> str:
    """Return the JSON key of a service account that no project has. The emulator does not check signatures."""
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    fields = {"type": "service_account", "private_key": key.decode(), "private_key_id": "1", "project_id": "tests"}
    fields |= {"client_email": "reader@tests.iam.gserviceaccount.com", "client_id": "1"}
    return json.dumps(fields | {"token_uri": "https://oauth2.googleapis.com/token"}, indent=2)


@contextlib.contextmanager
def running_azure(folder: Path, container: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Start an emulator of Azure Blob Storage that has the files in a private container, and yield the URL of the
    account."""
    if not azurite.folder().exists():
        pytest.skip("no Azurite on this machine: run make cluster-tools (needs Node.js)")
    (port,) = free_ports(1)
    command = [azurite.program(), "--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    command += ["--blobHost=127.0.0.1", f"--blobPort={port}"]
    with _running(command, folder, port, AZURITE_ACCOUNTS=f"{AZURE_ACCOUNT}:{AZURE_KEY}"):
        url = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
        store = AzureStore(
            container,
            account_name=AZURE_ACCOUNT,
            account_key=AZURE_KEY,
            endpoint=url,
            client_options={"allow_http": True},
        )
        _create_container(url, container)
        for name, content in files.items():
            obstore.put(store, name, content)
        yield url


def _create_container(url: str, container: str) -> None:
    """Create a container with a request that the account's key signs, because obstore cannot create one."""
    date, version = email.utils.formatdate(usegmt=True), "2023-11-03"
    headers = {"x-ms-date": date, "x-ms-version": version}
    resource = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{container}\nrestype:container"
    kind = "application/octet-stream"
    signed_text = "\n".join(
        ["PUT", *[""] * 4, kind, *[""] * 6, f"x-ms-date:{date}", f"x-ms-version:{version}", resource]
    )
    signature = hmac.digest(base64.b64decode(AZURE_KEY), signed_text.encode(), "sha256")
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(signature).decode()}"
    _send("PUT", f"{url}/{container}?restype=container", b"", headers | {"Content-Type": kind})


def azure_sas_token(container: str) -> str:
    """Return a shared access signature with which the blobs of a container can be read."""
    expiry, version = "2099-01-01T00:00:00Z", "2020-10-02"
    fields = ["r", "", expiry, f"/blob/{AZURE_ACCOUNT}/{container}", "", "", "", version, "c", *[""] * 6]
    signature = hmac.digest(base64.b64decode(AZURE_KEY), "\n".join(fields).encode(), "sha256")
    token = {"sp": "r", "se": expiry, "sv": version, "sr": "c", "sig": base64.b64encode(signature).decode()}
    return urllib.parse.urlencode(token)


@contextlib.contextmanager
def running_registry(folder: Path, htpasswd: str = "") -> Iterator[str]:
    """Start an empty OCI registry, and yield its host and port. `htpasswd` is a line with a user and a bcrypt hash."""
    (port,) = free_ports(1)
    auth = ""
    if htpasswd:
        (folder / "htpasswd").write_text(htpasswd)
        auth = f"auth: {{htpasswd: {{realm: tests, path: {folder / 'htpasswd'}}}}}\n"
    (folder / "registry.yaml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n{auth}storage: {{inmemory: {{}}}}\n"
    )
    with _running([_stores() / "registry", "serve", folder / "registry.yaml"], folder, port):
        yield f"127.0.0.1:{port}"


def push_artifact(registry: str, repository: str, tag: str, files: Mapping[str, bytes], **headers: str) -> str:
    """Push files to a registry as `oras push` does, and return the digest of the manifest."""
    empty = _push_blob(registry, repository, b"{}", headers) | {"mediaType": "application/vnd.oci.empty.v1+json"}
    layers = [
        _push_blob(registry, repository, content, headers)
        | {"mediaType": "application/octet-stream", "annotations": {"org.opencontainers.image.title": name}}
        for name, content in files.items()
    ]
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}
    return push_manifest(registry, repository, tag, manifest | {"config": empty, "layers": layers}, **headers)


def push_manifest(registry: str, repository: str, tag: str, manifest: Mapping[str, object], **headers: str) -> str:
    """Push a manifest, and return its digest."""
    body = json.dumps(manifest).encode()
    url = f"http://{registry}/v2/{repository}/manifests/{tag}"
    _send("PUT", url, body, headers | {"Content-Type": str(manifest["mediaType"])})
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def _push_blob(registry: str, repository: str, content: bytes, headers: Mapping[str, str]) -> dict[str, object]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    location = _send("POST", f"http://{registry}/v2/{repository}/blobs/uploads/", b"", headers)
    separator = "&" if "?" in location else "?"
    url = f"{location}{separator}digest={urllib.parse.quote(digest)}"
    _send("PUT", url, content, {**headers, "Content-Type": "application/octet-stream"})
    return {"digest": digest, "size": len(content)}


def _send(method: str, url: str, body: bytes, headers: Mapping[str, str]) -> str:
    """Send a request and return the header Location of the response."""
    request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)
    with urllib.request.urlopen(request, timeout=30) as response:
        return str(response.headers.get("Location", ""))


def _stores() -> Path:
    if not STORES.folder.exists():
        pytest.skip("no servers of files on this machine: run make cluster-tools (needs Go)")
    return STORES.folder


@contextlib.contextmanager
def _running(command: list[object], folder: Path, port: int, **variables: str) -> Iterator[None]:
    """Run a server until the context is left. It is ready when its port answers any HTTP request."""
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env={**os.environ, **variables})
    try:
        wait_for(lambda: _answers(port) or process.poll() is not None, what=f"start of {command[0]}")
        assert process.poll() is None, (folder / "server.log").read_text()
        yield
    finally:
        process.terminate()
        process.wait(10)


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
