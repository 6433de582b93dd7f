# SPDX-License-Identifier: Apache-2.0
"""Secrets: messages that hold none, and values that can be sent. Pure; whoever reads sources calls it."""

import re

from quire_spec.errors import AccessDenied

_URL = re.compile(r"(https?://)(?:[^/\s@]*@)?([^\s?#]*)(?:[?#]\S*)?", re.IGNORECASE)
_PROXY_ERROR_TYPES = ("ProxyError", "ClientHttpProxyError")
_MAX_CHARS = 300
"""Of a library's words: a place may have it quote pages."""


def describe_error(error: BaseException) -> str:
    """A library's error in one line, without user and query of the URLs in it: the one may be a password, the other a
    signature."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = redact_urls(lines[0])[:_MAX_CHARS] if lines else type(error).__name__
    # Of httpx and aiohttp; they say what the proxy answered as if it were the source's own answer.
    return f"the proxy refuses: {text}" if type(error).__name__ in _PROXY_ERROR_TYPES else text


def redact_urls(text: str) -> str:
    """The text without user and query of the URLs in it."""
    return _URL.sub(r"\1\2", text)


def check_header_value(value: str, secret: str, key: str) -> None:
    """Raise AccessDenied for what no header can carry: libraries that are to send it quote it, or panic."""
    if not (value.isascii() and value.isprintable()):
        raise AccessDenied(
            f"secret {secret!r}: key {key!r} holds a line break or another character that no header can carry; put the "
            "value there and nothing else"
        )
