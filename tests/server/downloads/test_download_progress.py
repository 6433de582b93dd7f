# SPDX-License-Identifier: Apache-2.0
"""Measurements of a download: bytes on disk, the total once it is known, and the rate of the last 30 s.

test_model_download.py tests that they are reported.
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


async def test_total_comes_from_the_index_until_all_sizes_are_known(meter, folder, now):
    assert meter.progress == DownloadProgress(0)
    meter.set_size("config.json", 100)
    assert meter.progress.total is None, "the weights files are not known yet"
    meter.set_weights(["a", "b"], 1000)
    assert meter.progress.total == 1100
    meter.set_size("a", 1004)
    assert meter.progress.total == 1104, "at least the known sizes"
    meter.set_size("b", 500)
    assert meter.progress.total == 1604


async def test_total_without_index_size_needs_all_file_sizes(meter):
    meter.set_weights(["a", "b"])
    meter.set_size("a", 600)
    assert meter.progress.total is None
    meter.set_size("b", 600)
    assert meter.progress.total == 1200


async def test_rate_covers_the_last_30_seconds(meter, folder, now):
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
    assert meter.progress == DownloadProgress(0, None, 0), "a discarded file does not count as progress"
    (folder / "a").write_bytes(b"x")
    for now[0] in (60.0, 75.0):
        await meter.sample()
    assert meter.progress == DownloadProgress(1, None, 0)


async def test_unreadable_folder_keeps_the_last_sample(meter, folder, now):
    (folder / "a").write_bytes(b"x" * 300)
    await meter.sample()
    folder.rename(folder.with_name("whole"))
    now[0] = 2.0
    await meter.sample()
    assert meter.progress == DownloadProgress(300)
