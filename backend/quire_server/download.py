# SPDX-License-Identifier: Apache-2.0
"""`python -m quire_server.download`: a model's files into a folder, once. A Job runs it before any GPU is taken.

Resumed where an earlier run was cut, verified where the place knows digests, and complete or not there: the folder
gets its name when the last file is in it. Only weights in safetensors, configuration and tokenizer are fetched, never
code, and by fixed names, so that every protocol can do it without listing.
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

from quire_server.background import in_thread
from quire_server.cache import Partial, sync
from quire_server.output import set_up_logging
from quire_server.places import Place
from quire_server.progress import Meter, told
from quire_server.sources import SourceOptions, Sources
from quire_server.transfer import MAX_CHANGES, DigestMismatch, Transfer
from quire_spec.catalogue import Source
from quire_spec.document import from_json
from quire_spec.errors import AccessDenied, ConfigError, InvalidArgument, NotFound, QuireError, Unavailable
from quire_spec.outcome import Outcome, Result
from quire_spec.progress import PATH, PORT_VARIABLE
from quire_spec.safetensors import file_bytes

log = logging.getLogger(__name__)

EXIT_DONE = 0
EXIT_AGAIN = 1
EXIT_WRONG = 2
"""Running again would change nothing: the source is wrong, or its Secret."""

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
OPTIONAL = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_WEIGHTS = ".safetensors"
_PARALLEL = 4
"""Files at a time: one connection rarely fills a line."""
_MAX_OTHER_BYTES = 256 * 2**20
"""Of everything but weights; the largest tokenizers have 35 MB."""
_MAX_SMALL_BYTES = {CONFIG: 64 * 2**20, INDEX: 64 * 2**20}
"""Of what is read here or by the planner, which takes no more; the largest indexes have 10 MB."""
_MAX_NAME_BYTES = 255
"""That file systems take."""
_PATIENCE_S = 300.0
"""What a place may have us wait for the next try: nobody waits behind us, and a hub's limits are of so long."""


def main(argv: Sequence[str] | None = None) -> int:
    """Download; returns the exit code."""
    args = _parser().parse_args(argv)
    set_up_logging()
    into = Path(os.path.abspath(args.into))
    try:
        if not into.name:
            raise ConfigError(f"--into {str(into)!r}: is the root; give a folder below it")
        source = _source(args.source)
        options = SourceOptions(args.secrets_dir, hub_endpoint=args.hub_endpoint)
        revision = asyncio.run(download(source, into, options, args.progress_port))
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr, flush=True)
        size = _size(_partial(into).folder) if into.name else 0
        _report(args.report, Outcome(_result(error), size, None, str(error)))
        return EXIT_AGAIN if isinstance(error, Unavailable) else EXIT_WRONG
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    _report(args.report, Outcome(Result.DOWNLOADED, _size(into), revision))
    return EXIT_DONE


async def download(source: Source, into: Path, options: SourceOptions, progress_port: int | None = None) -> str | None:
    """Bring the files of `source` into the folder `into`, unless it is there already; returns the commit, if known.

    How far it is can be asked on `progress_port`.

    Raises:
        InvalidArgument, NotFound: the source is wrong, or has no model. Unavailable: right, but not now.
    """
    with _disk_errors(into):
        if _is_there(into):
            return None
        with _alone(into) as partial:
            # Another one may have come to its end meanwhile.
            if _is_there(into):
                return None
            partial.folder.mkdir(exist_ok=True)
            meter = Meter(partial.folder)
            async with told(meter, progress_port):
                async with Sources(options) as sources:
                    place = sources.place(source)
                    pinned = source.http is not None and source.http.sha256 is not None
                    bring = _Bring(place, partial, meter)
                    names = await _bring_one_version(bring, place, pinned)
                await in_thread(_commit, partial, names, into)
                bring.forget()
    log.info("model is complete folder=%s files=%d bytes=%d", into, len(names), _size(into))
    return place.revision


async def _bring_one_version(bring: "_Bring", place: Place, pinned: bool) -> list[str]:
    """Bring every file, again where one changed after it was read."""
    for _ in range(MAX_CHANGES):
        names = await _bring_all(bring, place, pinned)
        # A commit's files are of one version.
        changed = [] if place.revision else await bring.changed(names)
        if not changed:
            return names
    raise Unavailable(
        f"{place.where(changed[0])}: it changed while the model was read, {MAX_CHANGES} times; write a new model "
        "beside the old one, under a name of its own"
    )


async def _bring_all(bring: "_Bring", place: Place, pinned: bool) -> list[str]:
    """Bring every file; returns their names. `pinned`: the source has the digest of the one file of weights."""
    await bring.file(CONFIG)
    names = [CONFIG, *[name for name in OPTIONAL if await bring.optional(name)]]
    if not await bring.optional(INDEX):
        bring.meter.weights([SINGLE])
        await bring.file(SINGLE)
        return [*names, SINGLE]
    if pinned:
        raise InvalidArgument(
            f"{place.where(INDEX)}: the source has one sha256, and these weights are in several files; remove it, or "
            "serve the model as one file"
        )
    shards, said = _shards(bring.partial.folder / INDEX, place)
    bring.meter.weights(shards, said)
    rest = iter(shards)

    async def some() -> None:
        for name in rest:
            await bring.file(name)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_PARALLEL):
                group.create_task(some())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [*names, INDEX, *shards]


class NoSpace(Unavailable):
    """The volume is full."""


_RESULTS: tuple[tuple[type[QuireError], Result], ...] = (
    (AccessDenied, Result.AUTH_FAILED),
    (NoSpace, Result.NO_SPACE),
    (DigestMismatch, Result.DIGEST_MISMATCH),
    (NotFound, Result.NOT_FOUND),
    (Unavailable, Result.UNREACHABLE),
)


def _result(error: QuireError) -> Result:
    return next((result for kind, result in _RESULTS if isinstance(error, kind)), Result.SOURCE_INVALID)


def _report(file: Path | None, outcome: Outcome) -> None:
    """Leave word for whoever started us; what became of the files does not depend on it."""
    if file is None:
        return
    try:
        file.write_text(outcome.dump())
    except OSError as error:
        log.warning("--report cannot be written file=%s error=%s", file, error)


class _Bring:
    """Brings files, and remembers in the partial folder which of them are whole, and of what version."""

    def __init__(self, place: Place, partial: Partial, meter: Meter) -> None:
        self._place, self.partial, self.meter = place, partial, meter
        self._transfer = Transfer(
            lambda name: (None if name.endswith(_WEIGHTS) else _MAX_SMALL_BYTES.get(name, _MAX_OTHER_BYTES), ""),
            meter.size,
            _PATIENCE_S,
        )
        self._whole = Partial(partial.folder.with_name(partial.folder.name + "-whole"))

    async def file(self, name: str) -> None:
        """One file, if it is not whole already."""
        if await self._is_whole(name):
            self.meter.size(name, self.partial.size(name))
            return
        # Before it is written to: what was whole may be an older version, and be so again when we are asked again.
        self._whole.note(name, None)
        await self._transfer.bring(self._place, self.partial, name)
        await self._transfer.verify(self._place, self.partial, name)
        if name.endswith(_WEIGHTS):
            await in_thread(self._check_end, name)
        self._whole.note(name, self.partial.versions().get(name))
        log.info("file is complete file=%s bytes=%d", name, self.partial.size(name))

    async def optional(self, name: str) -> bool:
        """The same for a file that need not be there; whether it is."""
        try:
            await self.file(name)
        except NotFound:
            return False
        return True

    async def changed(self, names: Sequence[str]) -> list[str]:
        """Those of these files that are others by now, as far as their place can tell."""
        noted = self._whole.versions()
        return await self._transfer.changed(self._place, {name: noted.get(name) for name in names})

    def forget(self) -> None:
        """Forget what was noted, once the files are elsewhere."""
        self.partial.forget()
        self._whole.forget()

    async def _is_whole(self, name: str) -> bool:
        noted = self._whole.versions().get(name)
        if noted is None or not (self.partial.folder / name).is_file():
            return False
        return noted == await self._transfer.version(self._place, name)

    def _check_end(self, name: str) -> None:
        """Refuse weights that end before their own header says: nobody else may have counted the bytes.

        Raises:
            InvalidArgument: they do; the file is dropped.
        """
        wanted, found = file_bytes(self.partial.folder / name), self.partial.size(name)
        if wanted is not None and found < wanted:
            self.partial.drop(name)
            raise InvalidArgument(
                f"{self._place.where(name)}: has {found} bytes, and by its header {wanted}; it was cut, or is "
                "still being written: store it again"
            )


def _shards(index: Path, place: Place) -> tuple[list[str], int | None]:
    """Names of the files of weights, and bytes of their tensors where the index says them.

    Raises:
        InvalidArgument: it names anything else.
    """
    try:
        document = json.loads(index.read_text())
        names = sorted(set(document["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"{place.where(INDEX)}: has no weight_map; save the model again") from error
    for name in names:
        if not isinstance(name, str) or not _is_name_of_weights(name):
            raise InvalidArgument(f"{place.where(INDEX)}: {str(name)[:100]!r} is not a file of weights beside it")
    if not names:
        raise InvalidArgument(f"{place.where(INDEX)}: names no files; save the model again")
    meta = document.get("metadata")
    said = meta.get("total_size") if isinstance(meta, dict) else None
    return names, int(said) if isinstance(said, int | float) and 0 < said < 2**63 else None


def _is_name_of_weights(name: str) -> bool:
    if not name.endswith(_WEIGHTS) or name != Path(name).name or not name.isprintable():
        return False
    return len(name.encode()) <= _MAX_NAME_BYTES


def _is_there(into: Path) -> bool:
    """Whether the model is there already.

    Raises:
        ConfigError: something else is.
    """
    if not os.path.lexists(into):
        return False
    if not (into / CONFIG).is_file():
        raise ConfigError(f"--into {str(into)!r}: is there, and holds no model; give a folder that is not there yet")
    log.info("model is there already folder=%s", into)
    return True


@contextmanager
def _alone(into: Path) -> Iterator[Partial]:
    """What has come so far; two downloads of one model on a shared claim would mix.

    Raises:
        Unavailable: another one is at it.
    """
    into.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(into)
    # A file, and open for writing: a folder's lock is none for other nodes of a claim by NFS.
    path = partial.folder.with_name(partial.folder.name + ".lock")
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unavailable(f"--into {str(into)!r}: another download is at it; wait for that one") from error
        yield partial
        # Whoever has opened it meanwhile will find that the model is there.
        path.unlink(missing_ok=True)


def _partial(into: Path) -> Partial:
    """Where the files are until the last is there."""
    return Partial(into.with_name(f".partial-{into.name}"))


def _commit(partial: Partial, names: list[str], into: Path) -> None:
    """Keep what was asked for, on disk before it has its name: a power cut must not leave half a model."""
    for path in partial.folder.iterdir():
        if path.name in names:
            sync(path)
        else:
            path.unlink()
    sync(partial.folder)
    partial.folder.rename(into)
    sync(into.parent)


@contextmanager
def _disk_errors(into: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else Unavailable
        raise kind(f"--into {str(into)!r}: {error.strerror or error}; make room, or use another volume") from error


def _size(folder: Path) -> int:
    """Bytes of a folder's files; 0 of one that is not there, or cannot be read."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:
        return 0


def _source(text: str) -> Source:
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--source: not JSON: {error}") from error
    source = from_json(Source, document, "--source")
    source.check("--source")
    return source


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quire_server.download",
        description="Download a model's weights, configuration and tokenizer into a folder, once; resume what was cut",
        epilog="exit codes: 0 it is there, 1 run it again, 2 the source or its Secret is wrong",
    )
    parser.add_argument("--source", required=True, metavar="JSON", help="spec.model.source, as JSON")
    parser.add_argument("--into", type=Path, required=True, metavar="DIR", help="the folder; made when complete")
    parser.add_argument("--secrets-dir", type=Path, metavar="DIR", help="Secrets, as DIR/<secret>/<key>")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write how it ended, as JSON: result, bytes, revision, message"
    )
    parser.add_argument(
        "--progress-port",
        type=int,
        default=os.environ.get(PORT_VARIABLE) or None,
        metavar="N",
        help=f"answer GET {PATH} here: bytes, total, bytes_per_s (default: {PORT_VARIABLE}, or nowhere)",
    )
    parser.add_argument("--hub-endpoint", metavar="URL", help="of the hub (default: HF_ENDPOINT, or the public one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
