# SPDX-License-Identifier: Apache-2.0
"""Digests of adapters: remembered while the files stay as they are."""

import os
import time

import pytest

from quire_spec.documents import adapter_digest as digest_module
from quire_spec.documents.adapter_digest import ADAPTER_FILES, DigestCache, adapter_digest


@pytest.fixture
def folder(tmp_path):
    for name in ADAPTER_FILES:
        write(tmp_path / name, name, age_s=60)
    return tmp_path


@pytest.fixture
def reads(monkeypatch):
    """Folders that were read."""
    found = []
    monkeypatch.setattr(digest_module, "adapter_digest", lambda folder: found.append(folder) or adapter_digest(folder))
    # The system sets the time of an inode, and nobody else: files here are as old as the clock says.
    monkeypatch.setattr(digest_module, "_RACY_S", -1.0)
    return found


def write(path, text, age_s):
    path.write_text(text)
    then = time.time() - age_s
    os.utime(path, (then, then))


def test_a_folder_that_stays_as_it_is_is_read_once(folder, reads):
    known = DigestCache()
    assert known.get(folder) == known.get(folder) == adapter_digest(folder)
    assert reads == [folder]


@pytest.mark.parametrize("name", ADAPTER_FILES)
def test_another_content_is_noticed_though_size_and_time_are_the_same(folder, reads, name):
    known, file = DigestCache(), folder / name
    before, times = known.get(folder), os.stat(file)
    time.sleep(0.02)  # of the inode's time, which nobody can set: a tick of the kernel's clock
    file.write_text(name[::-1])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert known.get(folder) == adapter_digest(folder) != before


def test_a_file_that_is_put_in_place_is_noticed(folder, reads):
    known = DigestCache()
    before = known.get(folder)
    write(folder / "new", "other", age_s=60)
    os.replace(folder / "new", folder / ADAPTER_FILES[1])
    assert known.get(folder) == adapter_digest(folder) != before


def test_a_file_that_has_just_changed_is_read_again(folder, reads, monkeypatch):
    monkeypatch.setattr(digest_module, "_RACY_S", 2.0)
    known = DigestCache()
    assert known.get(folder) == known.get(folder)
    assert reads == [folder, folder]


def test_a_file_that_is_gone_is_an_error(folder, reads):
    known = DigestCache()
    known.get(folder)
    (folder / ADAPTER_FILES[0]).unlink()
    with pytest.raises(OSError, match=ADAPTER_FILES[0]):
        known.get(folder)
