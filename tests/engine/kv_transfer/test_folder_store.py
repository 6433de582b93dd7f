# SPDX-License-Identifier: Apache-2.0
"""A folder of KV blocks: whichever change another program makes to its files, a reader gets right bytes or nothing."""

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.folder_store import drain

from quire_engine.kv_transfer import folder_store, read_time
from quire_engine.kv_transfer.folder_store import _HEADER, FolderStore
from quire_engine.kv_transfer.key_index import KeyIndex

ROW_BYTES = 3000
FILE_BYTES = _HEADER.size + ROW_BYTES


class Rows:
    """Rows of two buffers each."""

    layout = "cpu [('torch.float32', 1)]"

    def __init__(self, num_rows: int = 400) -> None:
        self.data = [[bytearray(1000), bytearray(2000)] for _ in range(num_rows)]

    def buffers(self, row: int) -> list[memoryview]:
        return [memoryview(buffer) for buffer in self.data[row]]

    def synchronize(self) -> None:
        pass

    def fill(self, row: int, seed: int) -> None:
        content = random.Random(seed).randbytes(ROW_BYTES)
        self.data[row] = [bytearray(content[:1000]), bytearray(content[1000:])]

    def content(self, row: int) -> bytes:
        return b"".join(self.data[row])


def key(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def wait(start: Callable[[Callable[[int], None]], None]) -> int:
    """Start a transfer and return the number of blocks that it has moved."""
    done, results = threading.Event(), list[int]()
    start(lambda number: (results.append(number), done.set()))
    assert done.wait(10)
    return results[0]


def write(store: FolderStore, rows: Rows, number: int) -> int:
    rows.fill(0, number)
    return wait(lambda on_done: store.write([key(number)], [0], on_done))


def read(store: FolderStore, rows: Rows, *numbers: int) -> int:
    """Read blocks into the rows from 1 on, and check their bytes."""
    row_numbers = list(range(1, len(numbers) + 1))
    num_read = wait(lambda on_done: store.read([key(n) for n in numbers], row_numbers, on_done))
    for row, number in list(zip(row_numbers, numbers, strict=True))[:num_read]:
        assert rows.content(row) == random.Random(number).randbytes(ROW_BYTES), "a wrong block"
    return num_read


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def store(tmp_path: Path, rows: Rows) -> Iterator[FolderStore]:
    opened = FolderStore(tmp_path / "kv", rows, "0/1", 2**30)
    yield opened
    drain(opened)


def file_of(store: FolderStore, tmp_path: Path, number: int) -> Path:
    return tmp_path / "kv" / store._representation.hex() / key(number).hex()[:2] / key(number).hex()


def files_of(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "kv").rglob("[0-9a-f]" * 64))


def test_blocks_are_read_as_they_were_written_also_by_another_process(
    store: FolderStore, rows: Rows, tmp_path: Path
) -> None:
    assert store.contains([key(1)]) == 0 and read(store, rows, 1) == 0 and store.misses == {"absent": 1}
    assert [write(store, rows, number) for number in (1, 2)] == [1, 1]
    assert store.contains([key(1), key(2), key(3), key(1)]) == 2
    assert read(store, rows, 1, 2, 3) == 2
    other_rows = Rows()
    other = FolderStore(tmp_path / "kv", other_rows, "0/1", 2**30)
    drain(other)
    assert other.contains([key(1), key(2)]) == 2 and read(other, other_rows, 2, 1) == 2


def test_representations_do_not_share_files(store: FolderStore, rows: Rows, tmp_path: Path) -> None:
    write(store, rows, 1)
    for layout, rank in (("cuda ...", "0/1"), (rows.layout, "0/2"), (rows.layout, "1/2")):
        other_rows = Rows()
        other_rows.layout = layout
        other = FolderStore(tmp_path / "kv", other_rows, rank, 2**30)
        assert other._representation != store._representation and read(other, other_rows, 1) == 0
    assert read(store, rows, 1) == 1


def _flip(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content[:-1], "length"),
        (lambda content: content[:40], "length"),
        (lambda _: b"", "length"),
        (lambda content: content + b"x", "length"),
        (lambda content: random.Random(3).randbytes(len(content)), "corrupt"),
        *(
            (lambda content, at=at: _flip(content, at), reason)
            for reason, positions in {
                "version": (4, 6),
                "key": (8, 23, 24, 55),
                "corrupt": (0, 56, 64, 80, FILE_BYTES - 1),
            }.items()
            for at in positions
        ),
    ],
)
def test_wrong_file_is_a_miss_and_is_deleted(
    store: FolderStore, rows: Rows, tmp_path: Path, change: Callable[[bytes], bytes], reason: str
) -> None:
    write(store, rows, 1)
    path = file_of(store, tmp_path, 1)
    path.write_bytes(change(path.read_bytes()))
    assert read(store, rows, 1) == 0 and store.misses == {reason: 1}
    assert not path.exists() and store.contains([key(1)]) == 0
    assert write(store, rows, 1) == 1 and read(store, rows, 1) == 1


def test_block_of_another_key_is_a_miss(store: FolderStore, rows: Rows, tmp_path: Path) -> None:
    write(store, rows, 1)
    write(store, rows, 2)
    file_of(store, tmp_path, 1).replace(file_of(store, tmp_path, 2))
    assert read(store, rows, 2) == 0 and store.misses == {"key": 1}


def test_links_and_other_kinds_of_files_are_never_followed(store: FolderStore, rows: Rows, tmp_path: Path) -> None:
    write(store, rows, 1)
    path, target = file_of(store, tmp_path, 1), tmp_path / "target"
    path.rename(target)
    content = target.read_bytes()
    path.symlink_to(target)
    assert read(store, rows, 1) == 0 and not path.is_symlink()
    os.mkfifo(path)
    assert read(store, rows, 1) == 0 and not path.exists()
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path)
    assert write(store, rows, 1) == 0 and read(store, rows, 1) == 0
    assert target.read_bytes() == content and sorted(store.misses) == ["symlink", "type"]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "full"),
        (errno.EDQUOT, "full"),
        (errno.EROFS, "read_only"),
        (errno.EIO, "io"),
        (errno.EACCES, "access"),
    ],
)
def test_folder_that_cannot_be_written_stops_writes_for_a_while(
    store: FolderStore, rows: Rows, number: int, reason: str
) -> None:
    write(store, rows, 1)
    with patch.object(folder_store.os, "writev", side_effect=OSError(number, os.strerror(number))) as writev:
        assert [write(store, rows, n) for n in (2, 3, 4)] == [0, 0, 0]
        assert writev.call_count == 1 and store.misses == {reason: 1}
    assert read(store, rows, 1) == 1, "blocks can still be read"
    store._no_writes_before = 0.0
    assert write(store, rows, 2) == 1


def test_folder_that_was_removed(store: FolderStore, rows: Rows, tmp_path: Path) -> None:
    write(store, rows, 1)
    for path in sorted((tmp_path / "kv").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "kv").rmdir()
    assert read(store, rows, 1) == 0 and write(store, rows, 2) == 0 and store.misses == {"absent": 2}
    store._no_writes_before = 0.0
    assert write(store, rows, 2) == read(store, rows, 2) == len(files_of(tmp_path)) == 1, "it is created again"


def test_quota_removes_the_files_that_were_used_least_recently(tmp_path: Path, rows: Rows) -> None:
    store = FolderStore(tmp_path / "kv", rows, "0/1", 100 * FILE_BYTES)
    for number in range(100):
        write(store, rows, number)
        os.utime(file_of(store, tmp_path, number), (number, number))
    stale = file_of(store, tmp_path, 0).with_name(".tmp-1-1")
    stale.write_bytes(b"x")
    os.utime(stale, (1, 1))
    assert read(store, rows, *range(5)) == 5, "they are used, so they are the youngest"
    for number in range(100, 160):
        write(store, rows, number)
    drain(store)
    paths = [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.name != ".lock"]
    assert sum(path.stat().st_size for path in paths) <= 113 * FILE_BYTES, "an eighth more at most"
    assert not stale.exists() and read(store, rows, *range(5)) == 5 and read(store, rows, 5) == 0


def test_sweep_waits_for_no_other_process(tmp_path: Path, rows: Rows) -> None:
    """Another process holds the lock of the sweep; when it is killed, the lock ends."""
    store = FolderStore(tmp_path / "kv", rows, "0/1", 80 * FILE_BYTES)
    write(store, rows, 0)
    lock = str(tmp_path / "kv/.lock")
    code = f"import fcntl, time; f = open({lock!r}, 'w'); fcntl.flock(f, 2); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        for number in range(95):
            assert write(store, rows, number) == 1
        assert store.contains([key(n) for n in range(95)]) == 95
        holder.send_signal(signal.SIGKILL)
    assert write(store, rows, 95) == 1
    drain(store)
    assert len(files_of(tmp_path)) == 80 and not store.misses


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_quota_is_kept_on_a_file_system_without_locks(tmp_path: Path, rows: Rows, number: int) -> None:
    store = FolderStore(tmp_path / "kv", rows, "0/1", 80 * FILE_BYTES)
    with patch.object(folder_store.fcntl, "flock", side_effect=OSError(number, os.strerror(number))):
        assert all(write(store, rows, n) for n in range(120))
        drain(store)
    assert len(files_of(tmp_path)) <= 90 and not store.misses


def test_sweep_continues_after_a_file_that_another_process_removes(tmp_path: Path, rows: Rows) -> None:
    store = FolderStore(tmp_path / "kv", rows, "0/1", 80 * FILE_BYTES)
    group_entries = store._group_entries

    def remove_first(group: int) -> Iterator[tuple[tuple[str, str], "os.DirEntry[str]"]]:
        for number, (names, entry) in enumerate(group_entries(group)):
            if number == 0:
                (tmp_path / "kv" / "/".join(names) / entry.name).unlink()
            yield names, entry

    with patch.object(store, "_group_entries", remove_first):
        for number in range(130):
            assert write(store, rows, number) == 1
        drain(store)
    assert len(files_of(tmp_path)) <= 91 and not store.misses


def test_sweep_removes_nothing_through_a_link(tmp_path: Path, rows: Rows) -> None:
    """Folders are replaced by links after the sweep has listed them."""
    store = FolderStore(tmp_path / "kv", rows, "0/1", 80 * FILE_BYTES)
    for number in range(85):
        write(store, rows, number)
    drain(store)
    store.max_bytes = 10 * FILE_BYTES
    store._unswept_bytes[0] = store.max_bytes
    outside, group_entries = tmp_path / "outside", store._group_entries

    def replace_folder(group: int) -> Iterator[tuple[tuple[str, str], "os.DirEntry[str]"]]:
        yield from group_entries(group)
        (tmp_path / "kv" / store._representation.hex()).rename(outside)
        (tmp_path / "kv" / store._representation.hex()).symlink_to(outside)

    with patch.object(store, "_group_entries", replace_folder):
        write(store, rows, 85)
        drain(store)
    assert len(list(outside.rglob("[0-9a-f]" * 64))) == 86 and store.misses == {"symlink": 1}
    assert write(store, rows, 86) == 0, "nothing is written while nothing can be removed"


def test_block_is_read_if_its_time_cannot_be_set(store: FolderStore, rows: Rows) -> None:
    write(store, rows, 1)
    with patch.object(folder_store.os, "utime", side_effect=OSError(errno.EROFS, "")):
        assert read(store, rows, 1) == 1 and not store.misses


def test_slow_reads_count_only_for_a_while(store: FolderStore, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_time, "_MEASUREMENT_S", 0.5)
    write(store, rows, 1)

    def slow_readv(*args: Any, readv: Callable[..., int] = os.readv) -> int:
        time.sleep(0.15)
        return readv(*args)

    with patch.object(folder_store.os, "readv", slow_readv):
        for _ in range(3):
            assert store.seconds_per_block == 0, "one long read does not count"
            read(store, rows, 1)
    assert store.seconds_per_block >= 0.15
    time.sleep(0.6)
    assert store.seconds_per_block == 0, "so that a sequence reads again"
    read(store, rows, 1)
    assert 0 < store.seconds_per_block < 0.15


def test_process_ends_while_transfers_hang(tmp_path: Path) -> None:
    """It also prints nothing: Triton, whose binding reports what is alive at the end, is loaded."""
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; from pathlib import Path; import threading, triton; "
        "from test_folder_store import FolderStore, Rows, key; rows = Rows(); begun = threading.Event(); "
        "rows.synchronize = lambda: begun.set() or threading.Event().wait(); "
        f"store = FolderStore(Path({str(tmp_path / 'kv')!r}), rows, '0/1', 2**30); "
        "[start([key(n)], [n], lambda _: None) for n in range(9) for start in (store.read, store.write)]; begun.wait()"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, timeout=30, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_store_leaves_no_descriptor_and_no_thread(tmp_path: Path, rows: Rows) -> None:
    others = set(threading.enumerate())
    store = FolderStore(tmp_path / "kv", rows, "0/1", 2**30)
    assert write(store, rows, 1) == read(store, rows, 1) == 1
    descriptor, threads = store._root, set(threading.enumerate()) - others
    assert len(threads) == 3 and Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path / "kv"
    del store
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert not os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_processes_that_write_the_same_keys_and_are_killed(tmp_path: Path) -> None:
    """Two processes write the same blocks, and one is killed again and again. Every block that is read is right."""
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; from pathlib import Path; "
        "from test_folder_store import FolderStore, Rows, write; rows = Rows(); "
        f"store = FolderStore(Path({str(tmp_path / 'kv')!r}), rows, '0/1', 2**30); "
        "[write(store, rows, n % 50) for n in range(10**6)]"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    rows = Rows()
    store = FolderStore(tmp_path / "kv", rows, "0/1", 2**30)
    for _ in range(3):
        writers = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
        deadline, num_read = time.monotonic() + 2.0, 0
        while time.monotonic() < deadline or not num_read:
            num_read += read(store, rows, random.randrange(50))
            assert time.monotonic() < deadline + 30
        for writer in writers:
            writer.kill()
            writer.wait()
    assert set(store.misses) <= {"absent"}


def fill_folder(store: FolderStore, root: Path, num_files: int) -> None:
    """Create files with the names of keys, which need no valid content until they are read."""
    for first in range(256):
        folder = root / store._representation.hex() / f"{first:02x}"
        folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        name = key(number).hex()
        os.close(os.open(root / store._representation.hex() / name[:2] / name, os.O_WRONLY | os.O_CREAT, 0o600))


def test_folder_with_many_files_delays_neither_the_start_nor_a_write(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of another life are found in parts, and a write does not wait for all parts."""
    num_files = 20_000
    fill_folder(FolderStore(tmp_path / "kv", rows, "0/1", 2**40), tmp_path / "kv", num_files)
    monkeypatch.setattr(folder_store, "_SCAN_PAUSE_S", 0.05)
    store = FolderStore(tmp_path / "kv", rows, "0/1", 2**40)
    assert store.contains([key(1)]) in (0, 1)
    assert write(store, rows, num_files) == 1 and len(store._index) < num_files, "the scan still runs"
    deadline = time.monotonic() + 60
    while len(store._index) <= num_files:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert all(store.contains([key(number)]) for number in range(num_files + 1))
    assert not store.contains([key(num_files + 1)])
    assert read(store, rows, num_files) == 1 and read(store, rows, 1) == 0 and store.misses == {"length": 1}


def test_scan_finds_what_other_processes_do_and_removes_stale_temporary_files(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_store, "_RESCAN_S", 0.0)
    store, other = (FolderStore(tmp_path / "kv", rows, "0/1", 2**30) for _ in range(2))

    def finds(*numbers: int) -> bool:
        """Two calls: the first starts a scan."""
        for _ in range(2):
            found = [number for number in range(4) if store.contains([key(number)])]
            drain(store)
        return found == list(numbers)

    assert finds()
    for number in (0, 1, 2):
        write(other, rows, number)
    assert finds(0, 1, 2)
    path = file_of(store, tmp_path, 1)
    path.unlink()
    assert finds(0, 2)
    stale, fresh, odd = (path.with_name(name) for name in (".tmp-1-1", ".tmp-2-2", "x" * 64))
    for file in (stale, fresh, odd):
        file.write_bytes(b"x")
    os.utime(stale, (1, 1))
    assert finds(0, 2)
    assert not stale.exists() and fresh.exists() and odd.exists()
    os.utime(fresh, (1, 1))
    assert finds(0, 2) and not fresh.exists(), "although the folder has not changed since"
    # A folder that has not changed for some time is not listed again.
    os.utime(path.parent, (1, 1))
    assert finds(0, 2)
    with patch.object(folder_store.os, "listdir", side_effect=AssertionError):
        assert finds(0, 2)


def test_quota_is_kept_by_processes_that_end_before_they_sweep(tmp_path: Path, rows: Rows) -> None:
    """Each process writes less than what makes it sweep."""
    for start in range(40):
        store = FolderStore(tmp_path / "kv", rows, "0/1", 64 * FILE_BYTES)
        for number in range(5):
            assert write(store, rows, 5 * start + number) == 1
        drain(store)
    assert len(files_of(tmp_path)) <= 72


def test_index_holds_the_keys_that_a_set_holds() -> None:
    rng, index, expected = random.Random(1), KeyIndex(), set[bytes]()
    keys = [bytes([rng.randrange(2)]) + rng.randbytes(31) for _ in range(300)]
    for _ in range(3000):
        chosen = rng.choice(keys)
        if rng.random() < 0.01:
            expected = {k for k in keys if rng.random() < 0.5}
            for first in range(256):
                index.replace(first, [k.hex() for k in expected if k[0] == first] + ["zz" * 32, "a", "_" * 64])
        elif rng.random() < 0.5:
            index.add(chosen)
            expected.add(chosen)
        else:
            index.discard(chosen)
            expected.discard(chosen)
        assert len(index) == len(expected) and {k for k in keys if k in index} == expected
