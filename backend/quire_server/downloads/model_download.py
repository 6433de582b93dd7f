# SPDX-License-Identifier: Apache-2.0
"""`python -m quire_server.download`: downloads a model into a folder, once. A Job runs this program before a GPU is
allocated.

If an earlier run was interrupted, the download resumes after the last byte that the earlier run received. Files are
checked against their digests if the source declares digests. The folder gets its final name only when its last file is
complete. The program downloads only safetensors weights, the configuration and the tokenizer. It never downloads code.
The names of the files are fixed, so that the program also works with a source that cannot list its files.
"""

import argparse
import asyncio
import errno
import fcntl
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire_server.downloads.adapter_cache import PartialDownload, fsync_path
from quire_server.downloads.download_progress import ProgressMeter, report_progress
from quire_server.downloads.earlier_revisions import remove_earlier_revisions
from quire_server.downloads.remote_weights import RemoteWeightsWriter, can_stream
from quire_server.downloads.resumable_download import MAX_SOURCE_CHANGES, DigestMismatch, ResumableDownload
from quire_server.logs import configure_logging
from quire_sources.factory import SourceFactory, SourceOptions
from quire_sources.reader import SourceReader
from quire_sources.readers.blocking import run_in_daemon_thread
from quire_spec.dataclass_json import from_json
from quire_spec.documents import tokenizer_files
from quire_spec.documents.checkpoint_digest import compute_digest
from quire_spec.documents.download_progress import PROGRESS_PATH, PROGRESS_PORT_VARIABLE
from quire_spec.documents.download_result import KEPT_FOLDERS_VARIABLE, DownloadReason, DownloadResult
from quire_spec.documents.remote_weights import REMOTE_WEIGHTS_FILE
from quire_spec.documents.sources import Source
from quire_spec.errors import AccessDenied, ConfigError, InvalidArgument, NotFound, QuireError, Unavailable
from quire_spec.model.pooler_config import MODULE_FILES, MODULES_FILE, module_folders
from quire_spec.model.safetensors_header import expected_file_bytes

logger = logging.getLogger(__name__)

EXIT_DONE = 0
EXIT_RETRY = 1
EXIT_PERMANENT_FAILURE = 2
"""Exit code if the source or its Secret is wrong, so that another run would fail in the same way."""

CONFIG_FILE, INDEX_FILE, SINGLE_WEIGHTS_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
OPTIONAL_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", "model.sig", "hf_quant_config.json",
    *(name for _, names in tokenizer_files.FORMATS for name in names if name != "tokenizer.json"),
    MODULES_FILE,
)  # fmt: skip
_WEIGHTS_SUFFIX = ".safetensors"
_MAX_CONCURRENT_FILES = 4
"""Maximum number of files that are downloaded at the same time. One connection alone rarely uses the full bandwidth."""
_MAX_OTHER_BYTES = 256 * 2**20
"""Maximum size of a file that does not contain weights. The largest known tokenizers have 35 MB."""
_MAX_BYTES_BY_FILE = {CONFIG_FILE: 64 * 2**20, INDEX_FILE: 64 * 2**20}
"""Maximum size of each file that this module or the planner parses. The largest known indexes have 10 MB."""
_MAX_NAME_BYTES = 255
"""Maximum length of a file name on common file systems."""
_MAX_RETRY_AFTER_S = 300.0
"""A download waits for at most this many seconds if the source sends Retry-After. The rate limits of the hub last this
long."""


def main(argv: Sequence[str] | None = None) -> int:
    """Download a model, and its draft model if there is one; returns the exit code. The report contains the commit of
    the main model."""
    args = _parser().parse_args(argv)
    configure_logging()
    targets = [Path(os.path.abspath(into)) for into in args.into]
    options = SourceOptions(args.secrets_dir, hub_endpoint=args.hub_endpoint)
    revisions: list[str | None] = []
    try:
        if len(args.source) != len(targets):
            raise ConfigError(
                f"--into: is given {len(targets)} times, but --source is given {len(args.source)} times; "
                "give one --into for each --source"
            )
        for target in targets:
            if not target.name:
                raise ConfigError(f"--into {str(target)!r}: is the root folder; give a folder below it")
        if args.kept_folders is not None:
            kept_names = {*args.kept_folders.split(","), *(target.name for target in targets)}
            for volume in {target.parent for target in targets}:
                remove_earlier_revisions(volume, kept_names)
        for text, target in zip(args.source, targets, strict=True):
            source = _parse_source(text)
            streams = args.stream_weights and can_stream(source)
            revisions.append(asyncio.run(download(source, target, options, args.progress_port, streams)))
            if args.digest:
                _keep_digest(target)
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr, flush=True)
        size = sum(_folder_bytes(folder) for t in targets if t.name for folder in (t, _partial_download(t).folder))
        _write_report(args.report, DownloadResult(_reason_for(error), size, None, str(error)))
        return EXIT_RETRY if isinstance(error, Unavailable) else EXIT_PERMANENT_FAILURE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    size = sum(map(_folder_bytes, targets))
    _write_report(args.report, DownloadResult(DownloadReason.DOWNLOADED, size, revisions[0]))
    return EXIT_DONE


async def download(
    source: Source, target: Path, options: SourceOptions, progress_port: int | None = None, streams: bool = False
) -> str | None:
    """Download `source` into the folder `target`, unless the folder exists; return the commit, if known.

    `progress_port` is the port on which the progress is served. If `streams` is true, the weights are not downloaded,
    but REMOTE_WEIGHTS_FILE is written; see `can_stream`.

    Raises:
        InvalidArgument, NotFound: the source is wrong, or has no model. Unavailable: a later run can succeed.
    """
    with _translate_disk_errors(target):
        if _is_downloaded(target):
            return None
        with _lock_partial(target) as partial:
            # Another download may have finished meanwhile.
            if _is_downloaded(target):
                return None
            partial.folder.mkdir(exist_ok=True)
            meter = ProgressMeter(partial.folder)
            async with report_progress(meter, progress_port):
                async with SourceFactory(options) as sources:
                    reader = sources.open_reader(source)
                    has_sha256 = source.http is not None and source.http.sha256 is not None
                    remote = RemoteWeightsWriter(source, options, reader) if streams else None
                    downloader = _ModelDownloader(reader, partial, meter, remote)
                    file_names = await _download_one_version(downloader, reader, has_sha256)
                await run_in_daemon_thread(_commit, partial, file_names, target)
                downloader.clear_versions()
    logger.info("model downloaded folder=%s files=%d bytes=%d", target, len(file_names), _folder_bytes(target))
    return reader.revision


async def _download_one_version(downloader: "_ModelDownloader", reader: SourceReader, has_sha256: bool) -> list[str]:
    """Download every file. If a file changed at the source after it was read, download it again."""
    for _ in range(MAX_SOURCE_CHANGES):
        file_names = await _download_all(downloader, reader, has_sha256)
        # All files of a commit have one version, so they cannot change during the download.
        own_files = [name for name in file_names if name != REMOTE_WEIGHTS_FILE]
        changed_files = [] if reader.revision else await downloader.changed_files(own_files)
        if not changed_files:
            return file_names
    raise Unavailable(
        f"{reader.display_name(changed_files[0])}: changed {MAX_SOURCE_CHANGES} times during the download; write a new "
        "model to a separate folder, under its own name"
    )


async def _download_all(downloader: "_ModelDownloader", reader: SourceReader, has_sha256: bool) -> list[str]:
    """Download every file; return their names. `has_sha256` is True if the source declares a digest for its weights
    file."""
    await downloader.download(CONFIG_FILE)
    file_names = [CONFIG_FILE, *[name for name in OPTIONAL_FILES if await downloader.download_optional(name)]]
    if MODULES_FILE in file_names:
        file_names += await _download_modules(downloader)
    has_index = await downloader.download_optional(INDEX_FILE)
    if downloader.remote is not None:
        names = [SINGLE_WEIGHTS_FILE]
        if has_index:
            names, _ = _read_shard_names(downloader.partial.folder / INDEX_FILE, reader)
        await downloader.remote.write(downloader.partial.folder, names)
        return [*file_names, *([INDEX_FILE] if has_index else []), REMOTE_WEIGHTS_FILE]
    if not has_index:
        downloader.meter.set_weights([SINGLE_WEIGHTS_FILE])
        await downloader.download(SINGLE_WEIGHTS_FILE)
        return [*file_names, SINGLE_WEIGHTS_FILE]
    if has_sha256:
        raise InvalidArgument(
            f"{reader.display_name(INDEX_FILE)}: the source has one sha256, but the weights have several files; remove "
            "the sha256, or serve the model as one file"
        )
    shards, total_bytes = _read_shard_names(downloader.partial.folder / INDEX_FILE, reader)
    downloader.meter.set_weights(shards, total_bytes)
    remaining = iter(shards)

    async def download_remaining() -> None:
        for name in remaining:
            await downloader.download(name)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_MAX_CONCURRENT_FILES):
                group.create_task(download_remaining())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [*file_names, INDEX_FILE, *shards]


async def _download_modules(downloader: "_ModelDownloader") -> list[str]:
    """Download the files of the modules that follow the layers, in folders of their own. Return their names.

    Raises:
        InvalidArgument: modules.json is wrong.
    """
    folder = downloader.partial.folder
    try:
        names = [f"{name}/{file}" for name in module_folders(folder) for file in MODULE_FILES]
    except ConfigError as error:
        raise InvalidArgument(str(error)) from None
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
    return [name for name in names if await downloader.download_optional(name)]


def _keep_digest(folder: Path) -> None:
    """Hash the weights and keep the hashes beside them, so that no pod has to hash them before it starts. If the files
    cannot be read, pods report the error, because the download itself is complete."""
    try:
        logger.info("model hashed folder=%s digest=%s", folder, compute_digest(folder, is_final=True))
    except ConfigError as error:
        logger.warning("model cannot be hashed folder=%s error=%s", folder, error)


class NoSpace(Unavailable):
    """The volume is full."""


_REASON_BY_ERROR: tuple[tuple[type[QuireError], DownloadReason], ...] = (
    (AccessDenied, DownloadReason.AUTH_FAILED),
    (NoSpace, DownloadReason.NO_SPACE),
    (DigestMismatch, DownloadReason.DIGEST_MISMATCH),
    (NotFound, DownloadReason.NOT_FOUND),
    (Unavailable, DownloadReason.UNREACHABLE),
)


def _reason_for(error: QuireError) -> DownloadReason:
    return next(
        (reason for error_type, reason in _REASON_BY_ERROR if isinstance(error, error_type)),
        DownloadReason.SOURCE_INVALID,
    )


def _write_report(path: Path | None, result: DownloadResult) -> None:
    """Write the result of the download to a file, for the process that started this program. If the file cannot be
    written, the error is only logged, because the model itself is complete."""
    if path is None:
        return
    try:
        path.write_text(result.dump())
    except OSError as error:
        logger.warning("report cannot be written file=%s error=%s", path, error)


class _ModelDownloader:
    """Downloads files. It also records which files are complete and which version each of them has; the records are
    stored next to the partial folder."""

    def __init__(
        self,
        reader: SourceReader,
        partial: PartialDownload,
        meter: ProgressMeter,
        remote: RemoteWeightsWriter | None = None,
    ) -> None:
        self._reader, self.partial, self.meter, self.remote = reader, partial, meter, remote
        self._downloader = ResumableDownload(
            lambda name: (
                None if name.endswith(_WEIGHTS_SUFFIX) else _MAX_BYTES_BY_FILE.get(name, _MAX_OTHER_BYTES),
                "",
            ),
            meter.set_size,
            _MAX_RETRY_AFTER_S,
        )
        self._completed = PartialDownload(partial.folder.with_name(partial.folder.name + "-whole"))

    async def download(self, name: str) -> None:
        """Download one file, unless it is already complete."""
        if await self._is_complete(name):
            self.meter.set_size(name, self.partial.size(name))
            return
        # The recorded version is removed before the first write. Otherwise, if the source returned to that version, the
        # partial file would be taken for complete.
        self._completed.record_version(name, None)
        await self._downloader.download(self._reader, self.partial, name)
        await self._downloader.verify(self._reader, self.partial, name)
        if name.endswith(_WEIGHTS_SUFFIX):
            await run_in_daemon_thread(self._check_not_truncated, name)
        self._completed.record_version(name, self.partial.versions().get(name))
        logger.info("file downloaded file=%s bytes=%d", name, self.partial.size(name))

    async def download_optional(self, name: str) -> bool:
        """Download an optional file; return whether it exists."""
        try:
            await self.download(name)
        except NotFound:
            return False
        return True

    async def changed_files(self, file_names: Sequence[str]) -> list[str]:
        """Return the files whose version has changed since they were downloaded."""
        recorded_versions = self._completed.versions()
        return await self._downloader.changed_files(
            self._reader, {name: recorded_versions.get(name) for name in file_names}
        )

    def clear_versions(self) -> None:
        """Delete the recorded versions. This is called after the files were moved to the target folder."""
        self.partial.clear_versions()
        self._completed.clear_versions()

    async def _is_complete(self, name: str) -> bool:
        recorded_version = self._completed.versions().get(name)
        if recorded_version is None or not (self.partial.folder / name).is_file():
            return False
        return recorded_version == await self._downloader.version(self._reader, name)

    def _check_not_truncated(self, name: str) -> None:
        """Reject a weights file that is shorter than its header states. Some servers do not report the length of a
        file. If such a server truncates a file, nothing before this check notices it.

        Raises:
            InvalidArgument: the file is shorter than its header states; the file is discarded.
        """
        expected_bytes, actual_bytes = expected_file_bytes(self.partial.folder / name), self.partial.size(name)
        if expected_bytes is not None and actual_bytes < expected_bytes:
            self.partial.discard(name)
            raise InvalidArgument(
                f"{self._reader.display_name(name)}: has {actual_bytes} bytes, but its header requires "
                f"{expected_bytes}; the file was truncated or is still being written; store it again"
            )


def _read_shard_names(index: Path, reader: SourceReader) -> tuple[list[str], int | None]:
    """Return the names of the weights files, and the total size of their tensors in bytes if the index contains it.

    Raises:
        InvalidArgument: the index is invalid, or contains the name of a file that is not a weights file in the same
            folder.
    """
    try:
        document = json.loads(index.read_text())
        names = sorted(set(document["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"{reader.display_name(INDEX_FILE)}: has no weight_map; save the model again") from error
    for name in names:
        if not isinstance(name, str) or not _is_weights_file_name(name):
            raise InvalidArgument(
                f"{reader.display_name(INDEX_FILE)}: {str(name)[:100]!r} is not a weights file in the same folder"
            )
    if not names:
        raise InvalidArgument(f"{reader.display_name(INDEX_FILE)}: its weight_map lists no files; save the model again")
    metadata = document.get("metadata")
    total_bytes = metadata.get("total_size") if isinstance(metadata, dict) else None
    return names, int(total_bytes) if isinstance(total_bytes, int | float) and 0 < total_bytes < 2**63 else None


def _is_weights_file_name(name: str) -> bool:
    if not name.endswith(_WEIGHTS_SUFFIX) or name != Path(name).name or not name.isprintable():
        return False
    return len(name.encode()) <= _MAX_NAME_BYTES


def _is_downloaded(target: Path) -> bool:
    """Return whether the model already exists.

    Raises:
        ConfigError: the path exists and is not a model.
    """
    if not os.path.lexists(target):
        return False
    if not (target / CONFIG_FILE).is_file():
        raise ConfigError(
            f"--into {str(target)!r}: already exists and contains no model; choose a path that does not exist"
        )
    logger.info("model already exists folder=%s", target)
    return True


@contextmanager
def _lock_partial(target: Path) -> Iterator[PartialDownload]:
    """Lock the partial download and return it. The lock prevents two processes that share the claim from downloading
    into the same folder.

    Raises:
        Unavailable: another download has the lock.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_download(target)
    # The lock is on a file that is open for writing, because on NFS, a lock on a folder is not visible to other nodes.
    lock_path = partial.folder.with_name(partial.folder.name + ".lock")
    with lock_path.open("w") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unavailable(
                f"--into {str(target)!r}: another download is running; wait until it has finished"
            ) from error
        yield partial
        # If another process has opened the lock file in the meantime, it finds the complete model.
        lock_path.unlink(missing_ok=True)


def _partial_download(target: Path) -> PartialDownload:
    """Return the partial download of a target folder. It holds the files until all of them are complete."""
    return PartialDownload(target.with_name(f".partial-{target.name}"))


def _commit(partial: PartialDownload, file_names: list[str], target: Path) -> None:
    """Write the files to disk and then rename the folder. In this order, a power failure cannot leave an incomplete
    model behind."""
    for path in sorted(partial.folder.rglob("*"), reverse=True):
        if path.is_dir() or path.relative_to(partial.folder).as_posix() in file_names:
            fsync_path(path)
        else:
            path.unlink()
    fsync_path(partial.folder)
    partial.folder.rename(target)
    fsync_path(target.parent)


@contextmanager
def _translate_disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error_type = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else Unavailable
        raise error_type(
            f"--into {str(target)!r}: {error.strerror or error}; make room, or use another volume"
        ) from error


def _folder_bytes(folder: Path) -> int:
    """Return the total size of the files in a folder, in bytes; 0 if the folder does not exist or cannot be read."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:
        return 0


def _parse_source(source_json: str) -> Source:
    try:
        document: Any = json.loads(source_json)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--source: not JSON: {error}") from error
    source = from_json(Source, document, "--source")
    source.validate("--source")
    return source


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quire_server.download",
        description="Download a model's weights, configuration and tokenizer into a folder. A complete model is not "
        "downloaded again. A download that was interrupted is resumed.",
        epilog="exit codes: 0 the model is complete, 1 run the command again, 2 the source or its Secret is wrong",
    )
    parser.add_argument(
        "--source",
        required=True,
        action="append",
        metavar="JSON",
        help="spec.model.source as JSON; for a draft model, repeat this option and --into",
    )
    parser.add_argument(
        "--into",
        type=Path,
        required=True,
        action="append",
        metavar="DIR",
        help="folder for the model; it is created when the model is complete",
    )
    parser.add_argument(
        "--secrets-dir", type=Path, metavar="DIR", help="folder that contains the Secrets, as files DIR/<secret>/<key>"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write the result to this file as JSON, with the keys result, bytes, revision and message",
    )
    parser.add_argument(
        "--progress-port",
        type=int,
        default=os.environ.get(PROGRESS_PORT_VARIABLE) or None,
        metavar="N",
        help=f"port on which GET {PROGRESS_PATH} returns bytes, total and bytes_per_s (default: the value of "
        f"{PROGRESS_PORT_VARIABLE}; if it is not set, no port is opened)",
    )
    parser.add_argument(
        "--kept-folders",
        default=os.environ.get(KEPT_FOLDERS_VARIABLE),
        metavar="NAMES",
        help="names of the folders with earlier revisions that pods use, separated by commas; the others are removed "
        f"(default: the value of {KEPT_FOLDERS_VARIABLE}; if it is not set, nothing is removed)",
    )
    parser.add_argument(
        "--digest",
        action="store_true",
        help="also hash the weights, unless this was done before, and keep the hashes beside them; KV blocks in files "
        "need them",
    )
    parser.add_argument(
        "--stream-weights",
        action="store_true",
        help="do not download the weights of an s3 source if Model Streamer can read them from the bucket",
    )
    parser.add_argument(
        "--hub-endpoint", metavar="URL", help="URL of the hub (default: the value of HF_ENDPOINT, or the public hub)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
