# SPDX-License-Identifier: Apache-2.0
"""By what a bucket lets in whoever plans for a model, and whoever downloads it."""

import pytest

from quire_spec.s3 import store_options

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
        ({}, {"AWS_ACCESS_KEY_ID": ""}, {"skip_signature": True}),
    ],
    ids=["a Secret before the platform", "a session", "the platform", "nobody: a public bucket"],
)
def test_credentials(credentials, environment, expected):
    found = store_options(None, None, credentials, environment, 60)
    assert {k: v for k, v in found.items() if k not in ("region", "client_options", "retry_config")} == expected


def test_plain_http_is_taken_where_the_endpoint_says_so():
    options = [store_options(endpoint, "eu", {}, {}, 60) for endpoint in (None, "https://s3.local", "http://s3.local")]
    assert [o["client_options"]["allow_http"] for o in options] == [False, False, True]
    assert [o.get("endpoint") for o in options] == [None, "https://s3.local", "http://s3.local"]
    assert {o["region"] for o in options} == {"eu"}
