# SPDX-License-Identifier: Apache-2.0
"""Command-line settings of the front, as one frozen value."""

from dataclasses import dataclass
from pathlib import Path

DEFAULT_MAX_BODY_BYTES = 8 * 2**20
"""A prompt of a million token ids; parsing it blocks the event loop for about 20 ms."""


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Arguments of `python -m quire_server.openai`."""

    run_dir: Path
    """Folder of the pod's Unix sockets."""
    served_name: str
    """Name of the base model."""
    host: str
    port: int
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    api_keys_dir: Path | None = None
    """Folder of API keys, one file each; None: no key is needed."""
    shared_prefix_cache: bool = False
    """Whether requests of different keys use each other's cached prompts."""
    uses_generation_config: bool = True
    """Whether generation_config.json of the checkpoint sets the defaults of sampling parameters."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages can read responses; * for all."""
