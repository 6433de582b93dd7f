# SPDX-License-Identifier: Apache-2.0
"""Resolves a model name to a folder.

The name is the path of a local folder, or a hub id. The folder of a hub id is in the local cache of huggingface_hub.
This module downloads weights (safetensors), configuration, tokenizer and chat template. It never downloads code. The
core and the text process can call it at the same time. In that case, the file locks of huggingface_hub make one process
wait until the other has downloaded the files.

`python -m quire_engine.weights.hub MODEL [REVISION]` downloads a model and shows the progress; `quire serve` runs it.
"""

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import huggingface_hub.errors
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from quire_engine.weights.conversion_report import CONVERT_COMMAND
from quire_spec.documents.tokenizer_files import FORMATS
from quire_spec.errors import ConfigError
from quire_spec.model.pooler_config import MODULE_FILES, module_folders
from quire_spec.net.redaction import describe_error, redact_urls

_ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.jinja", *(name for _, names in FORMATS for name in names)]
PICKLE_PATTERNS = ["pytorch_model*.bin", "adapter_model.bin"]
"""File name patterns of weights that only the converter downloads."""
# Subfolders contain other formats, and `consolidated` files contain the same weights again.
_IGNORE_PATTERNS = ["*/*", "consolidated*"]
_http: Any = import_module(huggingface_hub.errors.HTTPError.__module__.partition(".")[0])
"""The package with which huggingface_hub sends requests: httpx, and httpx2 since its release 2."""
_ERRORS = (OSError, ValueError, _http.HTTPError, _http.InvalidURL, ImportError)
"""Errors that huggingface_hub raises. HfHubHTTPError is an OSError. An invalid hub id raises ValueError. A SOCKS proxy
raises ImportError if the package for it is not installed. Network errors are exceptions of its HTTP package.
"""
_TIMEOUT_S = 15.0


def resolve_model(
    model: str,
    revision: str | None,
    progress: bool,
    download_dir: str | None = None,
    more_patterns: Sequence[str] = (),
) -> Path:
    """Return the folder of `model`, which is a folder or a hub id such as `org/name`.

    If files of a hub id are not cached, they are downloaded. `revision` is a branch, tag or commit of the hub id. If
    `progress` is true, a progress bar is shown for each file. The files are stored in `download_dir` if it is given,
    and otherwise in the cache of huggingface_hub. `more_patterns` are name patterns of additional files to download.

    Raises:
        ConfigError: the folder or model does not exist, access is denied, or the hub cannot be reached.
    """
    try:
        folder = Path(model).expanduser()
        is_folder = folder.is_dir()
    # The name is too long, or it starts with `~` and the name of an unknown user.
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"model: {model[:200]!r}: {error}") from error
    if folder.suffix == ".gguf" and folder.is_file():
        raise ConfigError(
            f"model: {model!r} is a GGUF file; convert it with: {CONVERT_COMMAND} {shlex.quote(model)} --into FOLDER"
        )
    if is_folder:
        if revision is not None:
            raise ConfigError(f"revision: {revision!r} was given for the folder {model!r}; only hub ids have revisions")
        return folder
    if model.startswith(("/", ".", "~")):
        raise ConfigError(f"model: folder {model!r} does not exist")
    timeout_error = _probe_hub(model, revision)
    try:
        with _progress_bars(progress):
            download = partial(
                huggingface_hub.snapshot_download,
                model,
                revision=revision,
                cache_dir=download_dir,
                local_files_only=timeout_error is not None,
            )
            patterns = [*_ALLOW_PATTERNS, *more_patterns]
            path: str = download(allow_patterns=patterns, ignore_patterns=_IGNORE_PATTERNS)
            # The parts of a model for embeddings that follow the layers are in folders of their own.
            if names := [f"{name}/{file}" for name in module_folders(Path(path)) for file in MODULE_FILES]:
                download(allow_patterns=names)
    except _ERRORS as error:
        revision_text = f" at revision {revision!r}" if revision else ""
        cause = timeout_error or error
        hub = redact_urls(huggingface_hub.constants.ENDPOINT)
        raise ConfigError(
            f"model: {model!r}{revision_text} is not a folder and could not be downloaded from the hub ({hub}): "
            f"{describe_error(cause)}"
        ) from error
    return Path(path)


def _probe_hub(model: str, revision: str | None) -> Exception | None:
    """Return the timeout error if the hub never replies, otherwise None.

    Such a hub accepts connections or drops packets, but it sends no response. `snapshot_download` would then wait
    forever, because it sends the same request without a time limit. This function sends it first, with a time limit.
    """
    try:
        huggingface_hub.HfApi().model_info(model, revision=revision, timeout=_TIMEOUT_S)
    except _http.TimeoutException as error:
        return cast(Exception, error)
    except _ERRORS:
        # Later, `snapshot_download` either reports the same error or finds all files in its cache.
        return None
    return None


@contextlib.contextmanager
def _progress_bars(progress: bool) -> Iterator[None]:
    must_disable = not progress and not are_progress_bars_disabled()
    if must_disable:
        disable_progress_bars()
    try:
        yield
    finally:
        if must_disable:
            enable_progress_bars()


def main(model: str, revision: str | None = None) -> int:
    """Download a model of the hub; return the exit code."""
    try:
        print(resolve_model(model, revision, progress=True))
    except ConfigError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
