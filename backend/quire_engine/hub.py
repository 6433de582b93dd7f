# SPDX-License-Identifier: Apache-2.0
"""Where a model's files are: a folder as it is, or a hub id as a folder of the hub's local cache.

Only weights (safetensors), configuration, tokenizer and chat template are fetched, never code. The engine and the text
process call it, maybe at the same time: huggingface_hub's locks on files have one wait for what the other brings.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from quire_spec.errors import ConfigError

_WANTED = ["*.json", "*.safetensors", "*.jinja"]
# Subfolders hold other formats, `consolidated` files the same weights a second time.
_UNWANTED = ["*/*", "consolidated*"]


def resolve_model(model: str, revision: str | None, progress: bool) -> Path:
    """Folder of `model`, a folder or a hub id such as `org/name`; downloads what is not in the hub's cache yet.

    `revision` is a branch, tag or commit of a hub id. `progress` shows a bar per file.

    Raises:
        ConfigError: no such folder, no such model, no access to it, or no way to reach the hub.
    """
    try:
        folder = Path(model).expanduser()
        is_folder = folder.is_dir()
    # Too long a name, or the home of somebody who is not known.
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"model: {model[:200]!r}: {error}") from error
    if is_folder:
        if revision is not None:
            raise ConfigError(f"revision: {revision!r} was given for the folder {model!r}; only hub ids have revisions")
        return folder
    if model.startswith(("/", ".", "~")):
        raise ConfigError(f"model: there is no folder {model!r}")
    try:
        with _bars(progress):
            path: str = huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
            )
    # HfHubHTTPError is an OSError, a name that is no hub id a ValueError; what the network throws comes as it is.
    except (OSError, ValueError, httpx.HTTPError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise ConfigError(
            f"model: {model!r}{at} is neither a folder nor could it be had from the hub: {_first_line(error)}"
        ) from error
    return Path(path)


@contextlib.contextmanager
def _bars(progress: bool) -> Iterator[None]:
    silence = not progress and not are_progress_bars_disabled()
    if silence:
        disable_progress_bars()
    try:
        yield
    finally:
        if silence:
            enable_progress_bars()


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
