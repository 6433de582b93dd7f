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
from quire_spec.net.redaction import describe_error, redact_urls

_ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# Subfolders hold other formats, `consolidated` files the same weights a second time.
_IGNORE_PATTERNS = ["*/*", "consolidated*"]
_ERRORS = (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL, ImportError)
"""HfHubHTTPError is an OSError, a name that is no hub id a ValueError, a proxy by SOCKS an ImportError; what the
network throws comes as it is."""
_TIMEOUT_S = 15.0


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
    timeout_error = _probe_hub(model, revision)
    try:
        with _progress_bars(progress):
            path: str = huggingface_hub.snapshot_download(
                model,
                revision=revision,
                allow_patterns=_ALLOW_PATTERNS,
                ignore_patterns=_IGNORE_PATTERNS,
                local_files_only=timeout_error is not None,
            )
    except _ERRORS as error:
        revision_text = f" at revision {revision!r}" if revision else ""
        cause = timeout_error or error
        hub = redact_urls(huggingface_hub.constants.ENDPOINT)
        raise ConfigError(
            f"model: {model!r}{revision_text} is neither a folder nor could it be had from the hub ({hub}): "
            f"{describe_error(cause)}"
        ) from error
    return Path(path)


def _probe_hub(model: str, revision: str | None) -> httpx.TimeoutException | None:
    """The error of a hub that takes connections, or lets them vanish, and says nothing; None where it does not.

    Asked beforehand: snapshot_download puts the same question without any limit of time.
    """
    try:
        huggingface_hub.HfApi().model_info(model, revision=revision, timeout=_TIMEOUT_S)
    except httpx.TimeoutException as error:
        return error
    except _ERRORS:
        # It says the same, or has all that is wanted in its cache.
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
