# SPDX-License-Identifier: Apache-2.0
"""Remove secrets from error messages. Callers: the readers of sources, the engine's download from the hub, the API
client."""

import re

_URL = re.compile(r"(https?://)(?:[^/\s@]*@)?([^\s?#]*)(?:[?#]\S*)?", re.IGNORECASE)
_PROXY_ERROR_TYPES = ("ProxyError", "ClientHttpProxyError")
_MAX_CHARS = 300
"""An error message of a library is cut to this number of characters. Some libraries quote a whole HTML page."""


def describe_error(error: BaseException) -> str:
    """Return the error of a library in one line. The user and the query of a URL are removed, because they can contain
    secrets."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = redact_urls(lines[0])[:_MAX_CHARS] if lines else type(error).__name__
    # If a proxy rejects a request, httpx and aiohttp report its response as if it were the response of the source.
    return f"the proxy refuses: {text}" if type(error).__name__ in _PROXY_ERROR_TYPES else text


def redact_urls(text: str) -> str:
    """Return `text`, with the user and the query removed from each URL."""
    return _URL.sub(r"\1\2", text)
