# SPDX-License-Identifier: Apache-2.0
"""Removal of secrets from error messages. Callers: source readers, the engine's hub download, the API client."""

import re

_URL = re.compile(r"(https?://)(?:[^/\s@]*@)?([^\s?#]*)(?:[?#]\S*)?", re.IGNORECASE)
_PROXY_ERROR_TYPES = ("ProxyError", "ClientHttpProxyError")
_MAX_CHARS = 300
"""Maximum number of characters of a library's message; some libraries quote a whole HTML page."""


def describe_error(error: BaseException) -> str:
    """Return a library's error in one line. User and query are removed from URLs; they can contain secrets."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = redact_urls(lines[0])[:_MAX_CHARS] if lines else type(error).__name__
    # httpx and aiohttp report the proxy's response as if it were the source's.
    return f"the proxy refuses: {text}" if type(error).__name__ in _PROXY_ERROR_TYPES else text


def redact_urls(text: str) -> str:
    """Return `text` without the user and the query of each URL."""
    return _URL.sub(r"\1\2", text)
