# SPDX-License-Identifier: Apache-2.0
"""How a bucket is asked: by URLs that obstore signs, since it would carry a session's token along to wherever it is
redirected. Pure.

The planner reads a model's sizes where the pods then download it: both have to be let in by the same credentials, or by
none, so both ask here.
"""

import re
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from quire_spec.errors import AccessDenied, ConfigError, Unavailable
from quire_spec.net import http_errors
from quire_spec.net.redaction import describe_error

CREDENTIAL_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""What a bucket's Secret holds; the last is not always needed."""
SIGNED_URL_LIFETIME = timedelta(minutes=15)
"""How long a signed URL can be used, by the bucket's clock: as far as AWS lets two clocks differ."""
MAX_ERROR_BYTES = 2**14
"""Of a bad answer, what is read to find its code."""
_DEFAULT_REGION = "us-east-1"
_ANONYMOUS_CREDENTIALS = {"access_key_id": "-", "secret_access_key": "-"}
"""Who signs URLs of public buckets, which are then asked without a signature."""
_AMBIENT_CREDENTIAL_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Environment that a platform gives a pod an identity with. Without any, requests go unsigned: public buckets."""


_ERROR_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_TLS_ERROR = re.compile(
    r"(?:InvalidCertificate|AlertReceived|InvalidMessage|PeerMisbehaved)\(\W*(?:Other\W+OtherError\W+)?(\w+)"
)
_SYSTEM_ERROR = re.compile(r'(?:message|error): "([\w :,-]{1,200}?)(?:: http|")')
_ENDPOINT = re.compile(r"https?://(?P<host>[\w.-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?(/[\w.~/-]*)?", re.ASCII)


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError for what obstore cannot ask: it panics, which ends more than the request."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or int(match["port"] or 0) >= 2**16 or not _is_host(match["host"]):
        # Not quoted: what is wrong with it may be a password in it.
        raise ConfigError(
            "s3 source: the endpoint is not http(s)://host, with a port and a path where there are; correct it"
        )


def _is_host(text: str) -> bool:
    """False for what looks like an address and is none."""
    try:
        if text.startswith("["):
            IPv6Address(text[1:-1])
        elif text.rstrip(".").rpartition(".")[2].isdecimal():
            IPv4Address(text)
    except ValueError:
        return False
    return True


def store_options(
    endpoint: str | None,
    region: str | None,
    credentials: Mapping[str, str],
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Arguments of obstore's S3Store but the bucket's name.

    `credentials` are AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and maybe AWS_SESSION_TOKEN, or nothing.
    """
    options: dict[str, Any] = {
        "region": region or _DEFAULT_REGION,
        "client_options": {
            "allow_http": bool(endpoint and endpoint.startswith("http://")),
            # Of a platform that is asked for an identity; obstore asks nobody else.
            "connect_timeout": timedelta(seconds=15),
            "timeout": timedelta(seconds=30),
        },
        # Whoever asks tries again by itself.
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=20)},
    }
    if endpoint:
        options["endpoint"] = endpoint
    if credentials:
        options["access_key_id"] = credentials["AWS_ACCESS_KEY_ID"]
        options["secret_access_key"] = credentials["AWS_SECRET_ACCESS_KEY"]
        if token := credentials.get("AWS_SESSION_TOKEN"):
            options["session_token"] = token
    elif not any(environment.get(name) for name in _AMBIENT_CREDENTIAL_VARIABLES):
        options |= _ANONYMOUS_CREDENTIALS
    return options


def object_url(url: str, options: Mapping[str, Any]) -> str:
    """What is asked of a bucket that was opened with these options: a URL that obstore signed, or the bare one where
    nobody did."""
    return url.partition("?")[0] if options.items() >= _ANONYMOUS_CREDENTIALS.items() else url


def error_from_status(source: str, status: int, headers: Mapping[str, str], body: bytes) -> Unavailable:
    """What a bucket's bad answer says, in words that hold no secret; `body` is its beginning."""
    if status in (401, 403):
        return AccessDenied(f"{source}: access denied; the Secret is missing, wrong, or lacks access")
    # Nothing else of it: a bucket quotes the request, with its token.
    match = _ERROR_CODE.search(body.decode(errors="replace"))
    code = f" {match[1]}" if match else ""
    if status == 400:
        return AccessDenied(
            f"{source}: HTTP 400{code}; the source's secret is wrong or no longer good, or its region is another"
        )
    if status == 301:
        return Unavailable(f"{source}: HTTP 301{code}; the bucket is in another region; correct region or endpoint")
    return http_errors.error_from_status(source, status, headers, code)


def signing_error(source: str, error: BaseException) -> Unavailable:
    """Why obstore could not sign: the platform that was asked for an identity gave none."""
    return Unavailable(f"{source}: {_describe_signing_error(error)}")


def _describe_signing_error(error: BaseException) -> str:
    """obstore's words of no answer: its own are the same for every cause, which is in the debug output below them."""
    text = describe_error(error).rpartition(" - ")[2]
    if "error sending request" not in text:
        # What comes before the dash is the URL and how long it took.
        return text
    if match := _TLS_ERROR.search(str(error)):
        return f"TLS fails: {match[1]}"
    if match := _SYSTEM_ERROR.search(str(error)):
        return match[1]
    return "no answer in time" if "TimedOut" in str(error) else text
