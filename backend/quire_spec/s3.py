# SPDX-License-Identifier: Apache-2.0
"""How a bucket is opened, as arguments of obstore's S3Store. Pure.

The planner reads a model's sizes where the pods then download it: both have to be let in by the same credentials, or by
none, so both ask here.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

_DEFAULT_REGION = "us-east-1"
_AMBIENT = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
"""Environment that a platform gives a pod an identity with. Without any, requests go unsigned: public buckets."""


def store_options(
    endpoint: str | None,
    region: str | None,
    credentials: Mapping[str, str],
    environment: Mapping[str, str],
    timeout_s: float,
) -> dict[str, Any]:
    """Everything but the bucket's name.

    `credentials` are AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and maybe AWS_SESSION_TOKEN, or nothing; `timeout_s` is
    of one request as a whole, body included: obstore has no other.
    """
    options: dict[str, Any] = {
        "region": region or _DEFAULT_REGION,
        "client_options": {
            "allow_http": bool(endpoint and endpoint.startswith("http://")),
            "connect_timeout": timedelta(seconds=15),
            "timeout": timedelta(seconds=timeout_s),
        },
        # Whoever asks tries again by itself.
        "retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=20)},
    }
    if endpoint:
        options["endpoint"] = endpoint
    if credentials:
        options["access_key_id"] = credentials["AWS_ACCESS_KEY_ID"]
        options["secret_access_key"] = credentials["AWS_SECRET_ACCESS_KEY"]
        if token := credentials.get("AWS_SESSION_TOKEN"):
            options["session_token"] = token
    elif not any(environment.get(name) for name in _AMBIENT):
        options["skip_signature"] = True
    return options
