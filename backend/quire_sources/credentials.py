# SPDX-License-Identifier: Apache-2.0
"""Reads the credentials that are stored in the Secret of a source. Error messages contain the names of the Secret and
the key, but never a value.

Values are read before each request, so that a rotated Secret takes effect without a restart.
"""

from collections.abc import Callable, Mapping

from quire_spec.documents.sources import HttpSource, HuggingFaceSource, S3Source, SecretRef
from quire_spec.errors import AccessDenied

SecretValues = Callable[[SecretRef], Mapping[str, str]]
"""Function that returns the content of a Secret as a mapping from keys to values. It raises a QuireError if the Secret
cannot be read."""

_OPTIONAL_S3_KEY = "AWS_SESSION_TOKEN"
_REQUIRED_S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def hub_token(source: HuggingFaceSource, read_secret: SecretValues) -> str | None:
    """Return the token in the source's Secret; None if the source has no Secret. Raises AccessDenied."""
    ref = source.tokenSecretRef
    return None if ref is None else _value(ref, read_secret(ref), ref.key or "token")


def s3_credentials(source: S3Source, read_secret: SecretValues) -> dict[str, str]:
    """Return the access key in the source's Secret, and the session token if there is one. Raises AccessDenied if the
    access key is missing."""
    ref = source.credentialsSecretRef
    if ref is None:
        return {}
    values = read_secret(ref)
    optional = [_OPTIONAL_S3_KEY] if _OPTIONAL_S3_KEY in values else []
    return {key: _value(ref, values, key) for key in (*_REQUIRED_S3_KEYS, *optional)}


def http_headers(source: HttpSource, read_secret: SecretValues) -> dict[str, str]:
    """Return the keys and values of the source's Secret as HTTP headers; raises AccessDenied."""
    ref = source.headersSecretRef
    if ref is None:
        return {}
    values = read_secret(ref)
    return {key: _value(ref, values, key) for key in values}


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
