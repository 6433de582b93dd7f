# SPDX-License-Identifier: Apache-2.0
"""The URL of a server with the OpenAI API, as users give it. Pure functions."""

from urllib.parse import urlsplit

from quire_spec.errors import ConfigError

_LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


def is_loopback(url: str) -> bool:
    """Return whether the server is on this machine, so that no proxy can be needed."""
    return urlsplit(url).hostname in _LOOPBACK_HOSTS


def server_root(url: str, option: str, key_option: str) -> str:
    """Return the URL without its last slash and without /v1.

    Args:
        option: the option that contains the URL, for messages.
        key_option: the option that contains the API key, for messages.

    Raises:
        ConfigError: the URL is wrong.
    """
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that are wrong
        is_server = False
    if not is_server or not url.isascii() or not url.isprintable() or {*" ?#"} & {*url}:
        raise ConfigError(f"{option} {url!r}: is not the URL of a server; give one such as http://localhost:8004")
    if parts.username is not None:
        raise ConfigError(f"{option}: contains a user name or password; use {key_option} for a key instead")
    return url.rstrip("/").removesuffix("/v1")
