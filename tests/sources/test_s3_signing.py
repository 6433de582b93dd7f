# SPDX-License-Identifier: Apache-2.0
"""Options of obstore's store: which credentials sign URLs, and which endpoints are valid."""

import pytest

from quire_sources.buckets.s3 import S3Signer
from quire_sources.buckets.url_signer import check_endpoint
from quire_spec.documents.sources import S3Source
from quire_spec.errors import ConfigError

KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}
FROM_PLATFORM = {"AWS_WEB_IDENTITY_TOKEN_FILE": "/run/token"}


@pytest.mark.parametrize(
    ("credentials", "environment", "expected"),
    [
        (KEYS, FROM_PLATFORM, {"access_key_id": "id", "secret_access_key": "secret"}),
        (
            KEYS | {"AWS_SESSION_TOKEN": "token"},
            {},
            {"access_key_id": "id", "secret_access_key": "secret", "session_token": "token"},
        ),
        ({}, FROM_PLATFORM, {}),
        ({}, {"AWS_ACCESS_KEY_ID": ""}, {"access_key_id": "-", "secret_access_key": "-"}),
    ],
    ids=["a Secret before the platform", "a session", "the platform", "a public bucket"],
)
def test_credentials(credentials, environment, expected):
    found = S3Signer(S3Source("s3://bucket"))._store_options(credentials, environment)
    assert {k: v for k, v in found.items() if k not in ("region", "client_options", "retry_config")} == expected


def test_plain_http_only_for_http_endpoints():
    options = [
        S3Signer(S3Source("s3://bucket", endpoint, "eu"))._store_options({}, {})
        for endpoint in (None, "https://s3.local", "http://s3.local")
    ]
    assert [o["client_options"]["allow_http"] for o in options] == [False, False, True]
    assert [o.get("endpoint") for o in options] == [None, "https://s3.local", "http://s3.local"]
    assert {o["region"] for o in options} == {"eu"}


@pytest.mark.parametrize(
    "endpoint",
    [
        "https://s3.eu-central-1.amazonaws.com",
        "http://minio:9000/",
        "http://minio_1.tales.svc/s3/~a",
        "http://[fd00::1]:9000",
        "http://10.0.0.1",
        "https://1.2.3.4.example",
    ],
)
def test_accepts_valid_endpoints(endpoint):
    check_endpoint("s3", endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("http://", "http://[:::]", "http://[1.2]", "http://1.2.3.4.5:9", "http://a.1.", "http://h:65536"),
        *(
            "http://h/\n",
            "http://[::",
            'http://a"b',
            "http://h:9)",
            "ftp://h",
            "http://user:s3cr3t@h",
            "http://h?s3cr3t",
        ),
    ],
)
def test_rejects_invalid_endpoints_without_quoting_them(endpoint):
    """obstore panics on some of these endpoints."""
    with pytest.raises(ConfigError, match=r"s3 source: the endpoint must be http\(s\)://host") as caught:
        check_endpoint("s3", endpoint)
    assert "s3cr3t" not in str(caught.value)
