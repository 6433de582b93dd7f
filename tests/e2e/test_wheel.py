# SPDX-License-Identifier: Apache-2.0
"""The wheel, installed into an empty environment: the commands of README's first two sections, in an empty folder.

The environment gets the dependencies from the one of the tests, because torch alone is a download of a gigabyte. The
hub is a web server that has the tiny model under the name that README uses, because tests have no network.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import venv
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.doc_snippets import ROOT, code_blocks
from support.quire_serve import EXAMPLES

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]
MODEL = EXAMPLES / "models/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
README = ROOT / "README.md"


@pytest.fixture(scope="module")
def environment():
    """Yield the variables of a shell whose PATH has an empty environment with pip, in an empty home."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheels = folder / "wheels"
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={wheels}", str(ROOT)]
        subprocess.run(build, check=True, timeout=300)
        venv.create(folder / "venv", with_pip=True, symlinks=True)
        _share_dependencies(folder)
        with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
            threading.Thread(target=hub.serve_forever, daemon=True).start()
            yield {
                **{
                    name: value
                    for name, value in os.environ.items()
                    if not name.startswith(("PYTHON", "QUIRE", "VIRTUAL"))
                },
                "HOME": str(folder),
                "PATH": f"{folder / 'venv/bin'}:{os.environ['PATH']}",
                "PIP_FIND_LINKS": f"{wheels} {os.environ.get('PIP_FIND_LINKS', '')}",
                "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
                "OMP_WAIT_POLICY": "passive",
            }
            hub.shutdown()


def _share_dependencies(folder):
    """Make everything but Quire visible to the environment."""
    site = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    shared = folder / "dependencies"
    shared.mkdir()
    for path in site.iterdir():
        if not re.match(r"_*(editable__?)?_*(impl_)?quire", path.name, re.IGNORECASE) and path.suffix != ".pth":
            (shared / path.name).symlink_to(path)
    target = next((folder / "venv/lib").glob("python*")) / "site-packages"
    (target / "dependencies.pth").write_text(f"{shared}\n")


class Hub(BaseHTTPRequestHandler):
    """The hub's API for one model."""

    def do_GET(self) -> None:
        repository = re.search(r"Qwen/[^/]+", self.path)
        files = {path.name: path.read_bytes() for path in MODEL.iterdir() if path.is_file()}
        name = re.sub(r".*/resolve/[^/]+/", "", self.path)
        if repository is None or ("/resolve/" in self.path and name not in files):
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        entries = [{"type": "file", "path": n, "rfilename": n, "size": len(d), "oid": n} for n, d in files.items()]
        document = entries if "/tree/" in self.path else {"id": repository[0], "sha": COMMIT, "siblings": entries}
        body = files[name] if "/resolve/" in self.path else json.dumps(document).encode()
        first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        part = body[int(first or 0) : int(last) + 1 if last else None]
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        self.wfile.write(part if self.command == "GET" else b"")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def first_blocks():
    """Return the command blocks of README's first two sections: the text under the title, and the next one."""
    head = re.split(r"^## ", README.read_text(), flags=re.MULTILINE)[:2]
    blocks = [text for text in code_blocks(README, "sh") if text in "".join(head)]
    assert blocks and sum(text.count("```") for text in head) == 2 * (len(blocks) + 1), "all blocks are commands"
    return blocks


def test_commands_of_readme_run_in_an_empty_folder(environment):
    with tempfile.TemporaryDirectory() as folder:
        for block in first_blocks():
            # A command that fails ends the block.
            result = subprocess.run(
                ["bash", "-e", "-c", block],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert result.returncode == 0, f"{block}\n{result.stdout[-2000:]}\n{result.stderr[-6000:]}"
        version = subprocess.run(["quire", "--version"], env=environment, capture_output=True, text=True, check=True)
        assert version.stdout.startswith("quire ")
        assert not any(ROOT.as_posix() in line for line in _origins(environment))


def _origins(environment):
    """Return the files of Quire's packages in the environment."""
    names = ("quire_engine", "quire_kernels", "quire_operator", "quire_server", "quire_sources", "quire_spec")
    code = f"import {', '.join(names)}; print({', '.join(f'{name}.__file__' for name in names)}, sep='\\n')"
    command = ["python", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
