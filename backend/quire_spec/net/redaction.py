# SPDX-License-Identifier: Apache-2.0
"""Error messages without secrets. Pure; called by source readers, the engine's hub download and the API client."""

import re

_URL = re.compile(r"(https?://)(?:[^/\s@]*@)?([^\s?#]*)(?:[?#]\S*)?", re.IGNORECASE)
_PROXY_ERROR_TYPES = ("ProxyError", "ClientHttpProxyError")
_MAX_CHARS = 300
"""Limit for a library's message, which may quote a whole page."""


def describe_error(error: BaseException) -> str:
    """Return a library's error in one line, without user and query of its URLs: they may be password and signature."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = redact_urls(lines[0])[:_MAX_CHARS] if lines else type(error).__name__
    # httpx and aiohttp report the proxy's response as if it were the source's.
    return f"the proxy refuses: {text}" if type(error).__name__ in _PROXY_ERROR_TYPES else text


def redact_urls(text: str) -> str:
    """Return the text without user and query of its URLs."""
    return _URL.sub(r"\1\2", text)
