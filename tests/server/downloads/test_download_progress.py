# SPDX-License-Identifier: Apache-2.0
"""What is measured of a download: bytes by the disk, their total as soon as it is known, and the rate of the last 30 s.

That it is told while a download lasts is in test_download.py.
"""

import pytest

from quire_server.downloads.download_progress import ProgressMeter
from quire_spec.documents.download_progress import DownloadProgress


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "partial").mkdir()
    return tmp_path / "partial"


@pytest.fixture
def meter(folder, now):
    return ProgressMeter(folder, lambda: now[0])


async def test_total_comes_from_the_index_and_is_exact_once_every_file_was_begun(meter, folder, now):
    assert meter.progress == DownloadProgress(0)
    meter.set_size("config.json", 100)
    assert meter.progress.total is None, "nobody knows the weights' files yet"
    meter.set_weights(["a", "b"], 1000)
    assert meter.progress.total == 1100
    meter.set_size("a", 1004)
    assert meter.progress.total == 1104, "no less than what is known"
    meter.set_size("b", 500)
    assert meter.progress.total == 1604


async def test_an_index_that_says_no_size_is_waited_for(meter):
    meter.set_weights(["a", "b"])
    meter.set_size("a", 600)
    assert meter.progress.total is None
    meter.set_size("b", 600)
    assert meter.progress.total == 1200


async def test_the_rate_is_of_what_came_lately(meter, folder, now):
    (folder / "a").write_bytes(b"x" * 300)
    await meter.sample()
    assert meter.progress == DownloadProgress(300), "what an earlier run brought came at no rate"
    for now[0], size in ((10.0, 400), (20.0, 500), (30.0, 1200), (40.0, 1300)):
        (folder / "a").write_bytes(b"x" * size)
        await meter.sample()
    assert meter.progress == DownloadProgress(1300, None, 30), "from 10 s to 40 s"
    (folder / "a").unlink()
    now[0] = 45.0
    await meter.sample()
    assert meter.progress == DownloadProgress(0, None, 0), "a file that is dropped is no progress"
    (folder / "a").write_bytes(b"x")
    for now[0] in (60.0, 75.0):
        await meter.sample()
    assert meter.progress == DownloadProgress(1, None, 0)


async def test_a_folder_that_cannot_be_read_leaves_the_last_reading(meter, folder, now):
    (folder / "a").write_bytes(b"x" * 300)
    await meter.sample()
    folder.rename(folder.with_name("whole"))
    now[0] = 2.0
    await meter.sample()
    assert meter.progress == DownloadProgress(300)
