# SPDX-License-Identifier: Apache-2.0
"""Which proxy a URL is asked through."""

import pytest

from quire_spec.proxy import by_way_of, proxy_of

P = "http://user:passw0rd@proxy:3128"


@pytest.mark.parametrize(
    ("environment", "url", "found"),
    [
        ({}, "https://hub", None),
        ({"HTTPS_PROXY": P}, "https://hub", (P, "HTTPS_PROXY")),
        ({"HTTPS_PROXY": P}, "http://hub", None),
        ({"HTTP_PROXY": "proxy:3128"}, "http://hub", ("http://proxy:3128", "HTTP_PROXY")),
        ({"ALL_PROXY": P}, "http://hub", (P, "ALL_PROXY")),
        ({"ALL_PROXY": P, "http_proxy": "http://x"}, "http://hub", ("http://x", "http_proxy")),
        ({"HTTPS_PROXY": P, "https_proxy": "https://x"}, "https://hub", ("https://x", "https_proxy")),
        ({"HTTPS_PROXY": P, "https_proxy": ""}, "https://hub", None),
        ({"HTTPS_PROXY": P}, "https://[::", None),
        ({"HTTPS_PROXY": P}, "https://hub:99999", None),
    ],
)
def test_the_proxy_of_a_url(environment, url, found):
    proxy = proxy_of(url, environment)
    assert (proxy and (proxy.url, proxy.variable)) == found


NEAR = {
    "*": ("hub", "10.0.0.1"),
    "hub": ("hub", "HUB", "a.hub", "hub."),
    ".svc,.cluster.local": ("minio.storage.svc", "a.b.cluster.local", "svc"),
    " *.example , other ": ("hub.example", "other"),
    "hub:443": ("hub",),
    "hub:8443": ("hub:8443",),
    "10.0.0.0/8": ("10.1.2.3", "10.1.2.3:9000"),
    "10.1.2.3": ("10.1.2.3",),
    "10.1.2.3:9000": ("10.1.2.3:9000",),
    "fd00::/8,::1": ("[fd00::1]", "[fd00::1]:9000", "[::1]"),
    "[fd00::1]:9000": ("[fd00::1]:9000",),
}
FAR = {
    "": ("hub",),
    ",": ("hub",),
    "hub": ("github", "hub.example"),
    "hub:8443": ("hub",),
    "10.0.0.0/8": ("11.1.2.3", "hub", "10.example"),
    "10.1.2.3": ("110.1.2.3", "10.1.2.31"),
    "fd00::/8": ("[fe00::1]", "10.1.2.3"),
    "[fd00::1]:9000": ("[fd00::1]",),
}


@pytest.mark.parametrize(
    ("no_proxy", "host", "near"),
    [(entry, host, near) for hosts, near in ((NEAR, True), (FAR, False)) for entry in hosts for host in hosts[entry]],
)
def test_hosts_that_are_asked_themselves(no_proxy, host, near):
    assert (proxy_of(f"https://{host}/a", {"HTTPS_PROXY": P, "NO_PROXY": no_proxy}) is None) == near


@pytest.mark.parametrize("user", ["", "user:passw0rd@", "user:passw0rd/@", "user@passw0rd@"])
@pytest.mark.parametrize("scheme", ["http", "https", "socks5"])
def test_the_proxy_is_named_and_its_password_is_not(scheme, user):
    words = by_way_of("https://hub", {"HTTPS_PROXY": f"{scheme}://{user}proxy:3128"}, "model 'a/b': no answer")
    assert words == f"; hub was asked through the proxy {scheme}://proxy:3128, which HTTPS_PROXY names"


def test_no_proxy_is_named_where_there_is_none():
    assert "passw0rd" not in repr(proxy_of("https://hub", {"HTTPS_PROXY": P}))
    assert by_way_of("https://hub", {"HTTPS_PROXY": P, "NO_PROXY": "hub"}, "https://hub/a: no answer") == ""


@pytest.mark.parametrize(("words", "who"), [("model 'a/b': no answer", "hub:8"), ("http://hub:8/a: no answer", "")])
def test_who_was_asked_is_said_once(words, who):
    assert by_way_of("http://user:passw0rd@hub:8/a", {}, words) == (f"; {who} was asked" if who else "")
    assert by_way_of("http://hub:8/a", {"HTTP_PROXY": P}, words).startswith(f"; {who or 'it'} was asked through")
