# SPDX-License-Identifier: Apache-2.0
"""Image parts of messages: finds their URLs, and decodes data: URLs. Pure."""

import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire_server.openai.errors import ApiError
from quire_spec.constants import MAX_IMAGE_BYTES
from quire_spec.errors import truncated_repr
from quire_spec.model.capabilities import MAX_IMAGES

IMAGE_PARTS = ("image_url", "input_image")
"""Types of parts with an image: of chat completions and of the Responses API."""
_DATA_URL = re.compile(r"data:(?P<type>[^;,]{0,64})(?:;[^;,]{1,64}){0,4};base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """The URL of an image in a request."""

    path: str
    """Path of the part in the request, for messages."""
    url: str

    def decode(self) -> bytes | None:
        """Return the content of a data: URL; None for other URLs. Raises ApiError if it is invalid or too large."""
        if self.url[:5].lower() != "data:":
            return None
        match = _DATA_URL.match(self.url)
        if match is None or not match["type"].lower().startswith("image/"):
            raise ApiError(
                400,
                f"{self.path}: must be like data:image/png;base64,..., got {truncated_repr(self.url[:80])}",
            )
        encoded = self.url[match.end() :]
        if len(encoded) // 4 * 3 > MAX_IMAGE_BYTES + 2:
            raise ApiError(
                400,
                f"{self.path}: has about {len(encoded) // 4 * 3} bytes, and at most {MAX_IMAGE_BYTES} are allowed; "
                "send a smaller image",
            )
        try:
            return binascii.a2b_base64(encoded.encode("ascii"), strict_mode=True)
        except ValueError as error:
            raise ApiError(400, f"{self.path}: is not valid base64 ({error}); encode the file again") from None


def image_urls(messages: object) -> list[ImageUrl]:
    """Return the URLs of all image parts, in the order of the messages; raises ApiError if a part is invalid."""
    urls = list(_iter_urls(messages))
    if len(urls) > MAX_IMAGES:
        raise ApiError(400, f"messages: at most {MAX_IMAGES} images are allowed, got {len(urls)}; send fewer")
    return urls


def _iter_urls(messages: object) -> Iterator[ImageUrl]:
    for i, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else []):
            if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
                yield _image_url(part, f"messages[{i}].content[{j}].image_url")


def _image_url(part: Mapping[str, Any], path: str) -> ImageUrl:
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    if value is None and part.get("file_id") is not None:
        shown = truncated_repr(part["file_id"])
        raise ApiError(
            400, f"{path}: missing, and no files are stored, so file_id {shown} has no file; send a data: URL"
        )
    if not isinstance(url, str) or not url:
        raise ApiError(400, f"{path}: must be a URL or an object with a url, got {truncated_repr(value)}")
    return ImageUrl(path, url)
