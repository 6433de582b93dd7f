# SPDX-License-Identifier: Apache-2.0
"""Describes weights that stay in a bucket, in place of their download. Called by model_download."""

import importlib.util
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire_sources.buckets.s3 import DEFAULT_REGION, has_ambient_credentials
from quire_sources.factory import SourceOptions
from quire_sources.reader import SourceReader
from quire_spec.dataclass_json import to_json
from quire_spec.documents.remote_weights import REMOTE_WEIGHTS_FILE, RemoteFile, RemoteWeights
from quire_spec.documents.sources import Source
from quire_spec.errors import InvalidArgument

logger = logging.getLogger(__name__)

_PACKAGE = "runai_model_streamer_s3"


def can_stream(source: Source) -> bool:
    """Return whether Model Streamer can read the weights of a source from where they are. Otherwise, log the reason."""
    if source.s3 is None:
        reason = f"a source of the kind {source.kind_name} is downloaded"
    elif importlib.util.find_spec(_PACKAGE) is None:
        reason = "runai-model-streamer-s3 is not installed; pip install 'quire-llm[streamer]'"
    else:
        return True
    logger.warning("weights are not streamed from the source: %s", reason)
    return False


class RemoteWeightsWriter:
    """Writes the description of the weights of one S3 source."""

    def __init__(self, source: Source, options: SourceOptions, reader: SourceReader) -> None:
        assert source.s3 is not None
        self._source, self._secrets_dir, self._reader = source.s3, options.secrets_dir, reader

    async def write(self, folder: Path, names: Sequence[str]) -> None:
        """Write REMOTE_WEIGHTS_FILE with the current sizes and versions of the weight files.

        Raises:
            InvalidArgument: the bucket reports no sizes or ETags. NotFound, Unavailable: errors of the source.
        """
        files = {name: await self._describe(name) for name in names}
        ref = self._source.credentialsSecretRef
        secret = None if ref is None or self._secrets_dir is None else str(self._secrets_dir.absolute() / ref.name)
        weights = RemoteWeights(
            replace(self._source, region=self._source.region or DEFAULT_REGION),
            files,
            secret,
            anonymous=ref is None and not has_ambient_credentials(os.environ),
        )
        (folder / REMOTE_WEIGHTS_FILE).write_text(json.dumps(to_json(weights), indent=2))

    async def _describe(self, name: str) -> RemoteFile:
        async with self._reader.open(name, num_bytes=1) as file:
            if file.size is None or file.version is None or not file.version.startswith('"'):
                raise InvalidArgument(
                    f"{self._reader.display_name(name)}: the bucket reports no size or no ETag, so the weights cannot "
                    "be streamed; set load_format to safetensors"
                )
            return RemoteFile(file.size, file.version)
