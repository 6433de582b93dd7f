# SPDX-License-Identifier: Apache-2.0
"""Reads weights from an S3-compatible bucket with Model Streamer, without a copy on the disk.

Source: Run:ai Model Streamer (NVIDIA), packages runai-model-streamer and runai-model-streamer-s3. They are an optional
extra of Quire: `streamer`. `tensor_files.py` is the caller. The tensors of a folder with REMOTE_WEIGHTS_FILE are here.
"""

import importlib.util
import json
import math
import os
import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire_spec.dataclass_json import read_json_object
from quire_spec.documents.remote_weights import RemoteWeights
from quire_spec.errors import ConfigError
from quire_spec.model.safetensors_header import LENGTH_BYTES, header_length

PACKAGE = "runai_model_streamer_s3"
_UNSIGNED_VARIABLE = "RUNAI_STREAMER_S3_UNSIGNED"


class RemoteBucket:
    """The weight files of one checkpoint in a bucket."""

    def __init__(self, weights: RemoteWeights) -> None:
        """Raises:
        ConfigError: Model Streamer for S3 is not installed, or the credentials cannot be read.
        """
        if importlib.util.find_spec(PACKAGE) is None:
            raise ConfigError(
                f"{weights.url('')}: the weights stay in the bucket, but runai-model-streamer-s3 is not installed; "
                "pip install 'quire-llm[streamer]'"
            )
        from runai_model_streamer.file_streamer import FileStreamer
        from runai_model_streamer.s3_utils.s3_utils import S3Credentials

        self._weights = weights
        self._identity = _read_identity(weights)
        self._credentials = S3Credentials(
            **self._identity, region_name=weights.source.region, endpoint=weights.source.endpoint
        )
        if weights.anonymous:
            os.environ[_UNSIGNED_VARIABLE] = "1"
        self._lock = threading.Lock()
        self._streamer = FileStreamer().__enter__()
        weakref.finalize(self, self._streamer.__exit__, None, None, None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._weights.files.values())

    def __contains__(self, name: str) -> bool:
        return name in self._weights.files

    def open(self, name: str) -> "RemoteTensorFile":
        """Return a file, of which only the header is read; raises ConfigError."""
        return RemoteTensorFile(self, self._weights.url(name), name)

    def read(self, name: str, start: int, num_bytes: int) -> Tensor:
        """Return bytes of a file, [num_bytes] of uint8; raises ConfigError."""
        from runai_model_streamer.file_streamer import FileChunks

        if start + num_bytes > self._weights.files[name].size:
            raise ConfigError(f"{self._weights.url(name)}: is truncated; store the file again")
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock, _naming(self._weights.url(name)):
            self._streamer.stream_files(
                [FileChunks.contiguous(0, self._weights.url(name), start, [num_bytes])], self._credentials
            )
            ((_, _, content),) = self._streamer.get_chunks()
        result: Tensor = content
        return result

    def stream_tensors(self, names: Collection[str], tensor_names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors with `tensor_names` in the files `names`, in the order in which they arrive. The caller
        can keep them.

        Raises:
            ConfigError: a file could not be read.
        """
        from runai_model_streamer import SafetensorsStreamer

        with _naming(self._weights.url("")), SafetensorsStreamer() as streamer:
            paths = [self._weights.url(name) for name in sorted(names)]
            streamer.stream_files(paths, self._credentials, tensor_names=set(tensor_names))
            yield from streamer.get_tensors()

    def check_unchanged(self) -> None:
        """Check after the weights were read that the files still have the recorded versions.

        Raises:
            ConfigError: a file was replaced, so that the weights may be a mixture; or the bucket cannot be reached.
        """
        import boto3
        import botocore
        from botocore.exceptions import BotoCoreError, ClientError

        signed = {f"aws_{name}": value for name, value in self._identity.items()}
        client = boto3.client(
            "s3",
            endpoint_url=self._weights.source.endpoint,
            region_name=self._weights.source.region,
            config=botocore.config.Config(signature_version=botocore.UNSIGNED) if self._weights.anonymous else None,
            **signed,
        )
        for name, file in self._weights.files.items():
            try:
                head = client.head_object(Bucket=self._weights.bucket, Key=self._weights.key(name))
            except (BotoCoreError, ClientError) as error:
                raise ConfigError(f"{self._weights.url(name)}: {error}") from error
            if head["ETag"] != file.version:
                raise ConfigError(
                    f"{self._weights.url(name)}: changed after the other files of the model were downloaded; remove "
                    "the folder of the model, and start again"
                )


class RemoteTensorFile:
    """The header of a safetensors file in a bucket, with the interface of `safe_open`."""

    def __init__(self, bucket: RemoteBucket, url: str, name: str) -> None:
        from runai_model_streamer.safetensors_streamer.safetensors_pytorch import SafetensorsMetadata

        length = header_length(_to_bytes(bucket.read(name, 0, LENGTH_BYTES)))
        header = _to_bytes(bucket.read(name, LENGTH_BYTES, length))
        try:
            entries = SafetensorsMetadata(json.loads(header), LENGTH_BYTES + length).tensors_metadata
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{url}: not a safetensors file: {error}; store it again") from error
        self._slices = {entry.name: RemoteSlice(bucket, name, LENGTH_BYTES + length, entry) for entry in entries}

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._slices)

    def get_slice(self, name: str) -> "RemoteSlice":
        """Return a tensor, whose values are read when it is indexed."""
        return self._slices[name]


class RemoteSlice:
    """A tensor in a bucket. An index reads only the rows that it selects, but all columns of them."""

    def __init__(self, bucket: RemoteBucket, name: str, data_start: int, metadata: Any) -> None:
        self._bucket, self._name = bucket, name
        self._start = data_start + metadata.offsets.start
        self._shape: list[int] = list(metadata.shape)
        self._dtype_name: str = metadata.dtype
        self._dtype: torch.dtype = metadata.get_torch_dtype()

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return self._shape

    def get_dtype(self) -> str:
        """Return the name of the dtype in safetensors, such as BF16."""
        return self._dtype_name

    def __getitem__(self, index: Any) -> Tensor:
        first, *others = index if isinstance(index, tuple) else (index,)
        num_rows = self._shape[0] if self._shape else 1
        if not self._shape or first is Ellipsis:
            rows, index = range(num_rows), index if self._shape else ...
        elif isinstance(first, slice):
            start, stop, step = first.indices(num_rows)
            rows, index = range(start, max(start, stop)), (slice(None, None, step), *others)
        else:
            rows, index = range(num_rows)[first : first + 1 or None], (0, *others)
        row_bytes = math.prod(self._shape[1:]) * self._dtype.itemsize
        content = self._bucket.read(self._name, self._start + rows.start * row_bytes, len(rows) * row_bytes)
        if content.data_ptr() % self._dtype.itemsize:
            content = content.clone()
        values: Tensor = content.view(self._dtype).view(len(rows), *self._shape[1:])[index]
        return values if self._shape else values.view(())


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Convert the errors of Model Streamer, which name no file."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{url}: Model Streamer failed: {error}; check the credentials and the bucket, or set load_format to "
            "safetensors"
        ) from error


def _read_identity(weights: RemoteWeights) -> dict[str, str]:
    """Return the values of the Secret, by the names that both libraries have for them; empty without a Secret."""
    if weights.secret is None:
        return {}
    path, keys = Path(weights.secret), weights.source.SECRET_KEYS
    try:
        if path.is_file():
            values = read_json_object(path)
        else:
            values = {key: (path / key).read_text() for key in keys if (path / key).exists()}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{weights.url('')}: the Secret cannot be read: {error}") from error
    if missing := [key for key in keys if key not in values and key != "AWS_SESSION_TOKEN"]:
        raise ConfigError(f"{weights.url('')}: the Secret {weights.secret} has no {' and '.join(missing)}; add it")
    return {key.removeprefix("AWS_").lower(): str(values[key]).strip() for key in keys if key in values}


def _to_bytes(content: Tensor) -> bytes:
    return content.numpy().tobytes()
