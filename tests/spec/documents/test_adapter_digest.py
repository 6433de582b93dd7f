# SPDX-License-Identifier: Apache-2.0
"""DigestCache: digests are cached while the files are unchanged."""

import os
import time

import pytest

from quire_spec.documents import adapter_digest as digest_module
from quire_spec.documents.adapter_digest import ADAPTER_FILES, CHAT_TEMPLATE_FILE, DigestCache, adapter_digest


@pytest.fixture
def folder(tmp_path):
    for name in ADAPTER_FILES:
        write(tmp_path / name, name, age_s=60)
    return tmp_path


@pytest.fixture
def reads(monkeypatch):
    """Folders that were read, in order."""
    folders = []
    monkeypatch.setattr(
        digest_module, "adapter_digest", lambda folder: folders.append(folder) or adapter_digest(folder)
    )
    # A program cannot set the change time of an inode. Without this, all files of the test count as racy.
    monkeypatch.setattr(digest_module, "_RACY_S", -1.0)
    return folders


def write(path, text, age_s):
    path.write_text(text)
    modified_at = time.time() - age_s
    os.utime(path, (modified_at, modified_at))


def test_a_chat_template_is_part_of_the_identity(folder, reads):
    cache = DigestCache()
    digests = {cache.get(folder)}
    for text in ("a", "b"):
        write(folder / CHAT_TEMPLATE_FILE, text, age_s=60)
        digests.add(cache.get(folder))
    assert len(digests) == 3
    (folder / CHAT_TEMPLATE_FILE).unlink()
    assert cache.get(folder) in digests


def test_reads_an_unchanged_folder_once(folder, reads):
    cache = DigestCache()
    assert cache.get(folder) == cache.get(folder) == adapter_digest(folder)
    assert reads == [folder]


@pytest.mark.parametrize("name", ADAPTER_FILES)
def test_detects_new_content_with_equal_size_and_mtime(folder, reads, name):
    cache, file = DigestCache(), folder / name
    before, times = cache.get(folder), os.stat(file)
    time.sleep(0.02)  # a tick of the kernel's clock, so that the inode's change time differs
    file.write_text(name[::-1])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache.get(folder) == adapter_digest(folder) != before


def test_detects_a_replaced_file(folder, reads):
    cache = DigestCache()
    before = cache.get(folder)
    write(folder / "new", "other", age_s=60)
    os.replace(folder / "new", folder / ADAPTER_FILES[1])
    assert cache.get(folder) == adapter_digest(folder) != before


def test_reads_a_recently_changed_file_again(folder, reads, monkeypatch):
    monkeypatch.setattr(digest_module, "_RACY_S", 2.0)
    cache = DigestCache()
    assert cache.get(folder) == cache.get(folder)
    assert reads == [folder, folder]


def test_missing_file_is_an_error(folder, reads):
    cache = DigestCache()
    cache.get(folder)
    (folder / ADAPTER_FILES[0]).unlink()
    with pytest.raises(OSError, match=ADAPTER_FILES[0]):
        cache.get(folder)
