# SPDX-License-Identifier: Apache-2.0
"""Pruning of image layers, with the real buildah and images of a few bytes. Needs no node."""

import shutil

import pytest
from nodocker_cluster import binaries, images, layers

DOCKERFILE = """
FROM scratch AS made
COPY first /first
COPY second /second
FROM scratch
COPY --from=made /second /second
COPY third /third
"""


@pytest.fixture
def buildah(tmp_path):
    """buildah with separate storage."""
    binaries.install_packages(images.PACKAGES, print)
    folder = tmp_path / "images"
    folder.mkdir()
    made = images._Buildah(folder, print)
    yield made
    made.run("rmi", "--all", "--force")
    shutil.rmtree(folder)


def test_prunes_layers_of_old_builds(buildah, tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "NUM_KEPT_BUILDS", 2)
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "Dockerfile").write_text(DOCKERFILE)
    file = tmp_path / "builds.json"

    def build(second):
        for name, content in (("first", "1"), ("second", second), ("third", "3")):
            (sources / name).write_text(content)
        said = buildah.run("build", "--isolation=chroot", "--layers", "--tag=localhost/layers:test", str(sources))
        return said, layers.parse_layer_ids(said), layers.prune(buildah.run, file, layers.parse_layer_ids(said))

    def there():
        return {
            image[:11]
            for image in buildah.run("images", "--all", "--quiet", "--no-trunc").replace("sha256:", "").split()
        }

    _, a, removed = build("a")
    assert (len(a), removed) == (4, 0) and a == there()
    _, b, removed = build("b")
    assert removed == 0 and there() == a | b and len(a & b) == 1, "both builds share the first step"
    _, c, removed = build("c")
    assert removed == 3 and there() == b | c, "layers of the oldest build only are removed"
    said, again, removed = build("b")
    assert again == b and removed == 0 and said.count("Using cache") == 4, "all steps come from the cache"
    _, d, _ = build("d")
    assert there() == b | d, "the least recently used build is removed first"
