# SPDX-License-Identifier: Apache-2.0
"""Reads the credentials that are stored in the Secret of a source. Error messages contain the names of the Secret and
the key, but never a value.

Values are read before each request, so that a rotated Secret takes effect without a restart.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from quire_spec.documents.sources import (
    AzureSource,
    GcsSource,
    HttpSource,
    HuggingFaceSource,
    OciSource,
    S3Source,
    SecretRef,
)
from quire_spec.errors import AccessDenied

SecretValues = Callable[[SecretRef], Mapping[str, str]]
"""Function that returns the content of a Secret as a mapping from keys to values. It raises a QuireError if the Secret
cannot be read."""

_S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_AZURE_CLIENT_KEYS = ("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID")


def hub_token(source: HuggingFaceSource, read_secret: SecretValues) -> str | None:
    """Return the token in the source's Secret; None if the source has no Secret. Raises AccessDenied."""
    ref = source.tokenSecretRef
    return None if ref is None else _value(ref, read_secret(ref), ref.key or "token")


def bucket_credentials(source: S3Source | GcsSource | AzureSource, read_secret: SecretValues) -> dict[str, str]:
    """Return the values in the Secret of a bucket; empty if the source has no Secret. Raises AccessDenied if a value is
    missing."""
    ref = source.credentialsSecretRef
    if ref is None:
        return {}
    values = read_secret(ref)
    match source:
        case S3Source():
            keys = [*_S3_KEYS, *(["AWS_SESSION_TOKEN"] if "AWS_SESSION_TOKEN" in values else [])]
        case GcsSource():
            return {name: _service_account_key(ref, values, name) for name in source.SECRET_KEYS}
        case AzureSource():
            keys = _azure_keys(ref, values)
    return {key: _value(ref, values, key) for key in keys}


def docker_config(source: OciSource, read_secret: SecretValues) -> Mapping[str, Any] | None:
    """Return the content of .dockerconfigjson in the Secret of a registry; None if the source has no Secret. Raises
    AccessDenied."""
    ref = source.pullSecretRef
    if ref is None:
        return None
    (key,) = source.SECRET_KEYS
    document = _json_value(ref, read_secret(ref), key)
    if not isinstance(document, dict):
        raise AccessDenied(
            f"secret {ref.name!r}: the value of key {key!r} is not JSON; create the Secret with `kubectl create secret "
            "docker-registry`"
        )
    return document


def http_headers(source: HttpSource, read_secret: SecretValues) -> dict[str, str]:
    """Return the keys and values of the source's Secret as HTTP headers; raises AccessDenied."""
    ref = source.headersSecretRef
    if ref is None:
        return {}
    values = read_secret(ref)
    return {key: _value(ref, values, key) for key in values}


def _azure_keys(ref: SecretRef, values: Mapping[str, str]) -> list[str]:
    """Return the keys of the strongest credential in the Secret: a key of the account, a shared access signature, or an
    application."""
    for key in ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"):
        if key in values:
            return [key]
    if any(key in values for key in _AZURE_CLIENT_KEYS):
        return list(_AZURE_CLIENT_KEYS)
    raise AccessDenied(
        f"secret {ref.name!r}: has neither AZURE_STORAGE_ACCOUNT_KEY nor AZURE_STORAGE_SAS_TOKEN nor "
        f"{', '.join(_AZURE_CLIENT_KEYS)}; add one of them to the Secret"
    )


def _json_value(ref: SecretRef, values: Mapping[str, str], key: str) -> Any:
    """Return a value of a Secret that is JSON; None if it is not."""
    if key not in values:
        raise AccessDenied(f"secret {ref.name!r}: has no key {key!r}; add it to the Secret, or correct the key")
    try:
        return json.loads(values[key])
    except ValueError:
        return None


def _service_account_key(ref: SecretRef, values: Mapping[str, str], key: str) -> str:
    """Return the JSON key of a service account, on one line."""
    document = _json_value(ref, values, key)
    if not isinstance(document, dict) or document.get("type") != "service_account":
        # A file of another type can name a program or a URL that a library would start or ask.
        raise AccessDenied(
            f"secret {ref.name!r}: the value of key {key!r} is not the JSON key of a service account; store the file "
            "that `gcloud iam service-accounts keys create` wrote"
        )
    return json.dumps(document)


def _value(ref: SecretRef, values: Mapping[str, str], key: str) -> str:
    if key not in values:
        raise AccessDenied(f"secret {ref.name!r}: has no key {key!r}; add it to the Secret, or correct the key")
    # Most files end in a newline. If a Secret is created from files, its values therefore end in a newline, too.
    value = values[key].strip()
    if not (value.isascii() and value.isprintable()):
        # If a library gets such a value as a header, it quotes the value in an error message, or it panics.
        raise AccessDenied(
            f"secret {ref.name!r}: the value of key {key!r} contains a line break or another character that is not "
            "allowed in a header; store only the credential there"
        )
    return value
