# SPDX-License-Identifier: Apache-2.0
"""Loads the images of a request: from data: URLs, and over HTTPS from the hosts of an allow list.

A request must never make the server read from its own network (server-side request forgery): the host must be in the
list, which is empty by default, its address must be public, the connection goes to the address that was checked, no
proxy resolves the name again, and redirects to other hosts are not followed.
"""

import asyncio
from collections.abc import Collection, Sequence

from quire_server.openai.errors import ApiError
from quire_server.openai.images.image_parts import ImageUrl
from quire_spec.constants import MAX_IMAGE_BYTES
from quire_spec.errors import NotFound, QuireError, truncated_repr

TIMEOUT_S = 20.0
"""Maximum time for one image."""
MAX_FETCHES = 8
"""Maximum number of images that are fetched at a time. Others wait for them."""
_PUBLIC_ONLY = "its address is private; use a public address, or send the image as a data: URL"


class ImageLoader:
    """Loads images."""

    def __init__(self, allowed_domains: Collection[str], max_fetches: int = MAX_FETCHES) -> None:
        """`allowed_domains` are the hosts from which images are fetched."""
        self._allowed_domains = frozenset(domain.lower() for domain in allowed_domains)
        self._fetches = asyncio.Semaphore(max_fetches)

    async def load(self, urls: Sequence[ImageUrl]) -> list[bytes]:
        """Return the contents of the files. Raises ApiError if a URL is invalid or not allowed, or if it cannot be
        fetched."""
        decoded = [url.decode() for url in urls]
        fetched = [url for url, data in zip(urls, decoded, strict=True) if data is None]
        for url in fetched:
            self._check_allowed(url)
        results = iter(await asyncio.gather(*map(self._fetch, fetched)))
        return [next(results) if data is None else data for data in decoded]

    def _check_allowed(self, url: ImageUrl) -> None:
        from yarl import URL

        try:
            parsed = URL(url.url)
            host = (parsed.host or "").lower().rstrip(".")
        except ValueError:
            raise ApiError(400, f"{url.path}: {truncated_repr(url.url[:80])} is not a URL; send a data: URL") from None
        if parsed.scheme != "https" or parsed.user is not None or parsed.password is not None:
            raise ApiError(
                400, f"{url.path}: must be a data: or https: URL without a user, got {truncated_repr(url.url[:80])}"
            )
        if host not in self._allowed_domains:
            raise ApiError(
                400,
                f"{url.path}: images from {truncated_repr(host)} are not allowed; send the image as a data: URL, or "
                "add the host to openai.allowedMediaDomains",
            )

    async def _fetch(self, url: ImageUrl) -> bytes:
        # Imported here, because most fronts fetch no images.
        from yarl import URL

        from quire_sources.http.borders import Borders
        from quire_sources.http.client import HttpClient, create_session

        borders, target = Borders((), _PUBLIC_ONLY), URL(url.url)
        name, data = str(target.with_query(None).with_fragment(None)), bytearray()
        try:
            async with self._fetches, asyncio.timeout(TIMEOUT_S), create_session(borders) as session:
                client = HttpClient(session, borders, use_proxy=False)
                async with client.open(target, {}, {}, name) as file:
                    async for chunk in file.chunks:
                        data += chunk
                        if max(len(data), file.size or 0) > MAX_IMAGE_BYTES:
                            raise ApiError(
                                400,
                                f"{url.path}: {name} has more than {MAX_IMAGE_BYTES} bytes; use a smaller image",
                            )
        except TimeoutError:
            raise ApiError(400, f"{url.path}: {name} took more than {TIMEOUT_S:g} s; send a data: URL") from None
        except NotFound:
            raise ApiError(400, f"{url.path}: {name} does not exist; check the URL") from None
        except QuireError as error:
            raise ApiError(400, f"{url.path}: {error}") from error
        return bytes(data)
