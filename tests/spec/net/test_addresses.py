# SPDX-License-Identifier: Apache-2.0
"""Listen addresses, and addresses in URLs."""

import pytest

from quire_spec.net.addresses import format_for_url, listen_address


@pytest.mark.parametrize(
    ("host", "pod_ip", "expected"),
    [
        ("0.0.0.0", None, "0.0.0.0"),
        ("0.0.0.0", "10.244.0.7", "0.0.0.0"),
        ("0.0.0.0", "fd00:10:244::7", "::"),
        ("127.0.0.1", "fd00:10:244::7", "127.0.0.1"),
        ("::", "10.244.0.7", "::"),
        ("localhost", None, "localhost"),
    ],
)
def test_listens_on_the_pods_address_family(host, pod_ip, expected):
    assert listen_address(host, {} if pod_ip is None else {"POD_IP": pod_ip}) == expected


def test_format_for_url():
    assert [format_for_url(host) for host in ("::1", "10.0.0.1", "localhost")] == ["[::1]", "10.0.0.1", "localhost"]
