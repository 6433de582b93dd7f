# SPDX-License-Identifier: Apache-2.0
"""Guards over the repository: traps that a reader would not see, and promises the documents make."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "quire_operator": "operator",
    "quire_engine": "backend",
    "quire_server": "backend",
    "quire_sources": "backend",
    "quire_spec": "backend",
    "quire_kernels": "kernels",
}


def sources():
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


@pytest.mark.parametrize("folder", ["operator", "backend", "kernels"])
def test_top_level_folders_hold_packages_only(folder):
    # operator/__init__.py would shadow the standard library's operator for everyone who runs Python in the root.
    assert not list((ROOT / folder).glob("*.py"))


def test_packages_keep_few_modules_at_their_root_and_in_a_folder():
    not_counted = {"__init__.py", "__main__.py", "download.py", "read_model.py", "preload.py"}
    for name, folder in PACKAGES.items():
        if name == "quire_kernels":
            continue
        root = ROOT / folder / name
        modules = [path for path in root.glob("*.py") if path.name not in not_counted]
        assert len(modules) <= 4, modules
        for directory in [path for path in root.rglob("*") if path.is_dir() and path.name != "__pycache__"]:
            assert len([path for path in directory.glob("*.py") if path.name != "__init__.py"]) <= 18, directory


def test_every_package_is_typed():
    assert all((ROOT / folder / name / "py.typed").exists() for name, folder in PACKAGES.items())


def test_every_source_file_has_its_licence_line_and_docstring():
    bare = []
    for path in sources():
        text = path.read_text()
        if text and not text.startswith(("# SPDX-License-Identifier: Apache-2.0", "#!")):
            bare.append(f"{path.relative_to(ROOT)}: no SPDX line")
        if text and path.name != "__init__.py" and not ast.get_docstring(ast.parse(text)):
            bare.append(f"{path.relative_to(ROOT)}: no module docstring")
    assert bare == []


def test_make_help_lists_every_target_that_says_what_it_does():
    said = re.findall(r"^([\w-]+):.*## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    done = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [re.sub("\x1b\\[[0-9]*m", "", line).split(maxsplit=1) for line in done.stdout.splitlines()]
    assert listed == [[name, words] for name, words in said]


def test_nothing_of_ours_is_named_after_the_kernel_language():
    assert not [p for p in sources() if p.name.startswith("triton") or "/triton" in str(p.relative_to(ROOT))]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("quire_spec.engine.config", {"torch", "numpy", "yaml"}),
        ("quire_engine.text.process", {"torch", "transformers", "numpy"}),
        ("quire_engine.scheduling.scheduler", {"torch"}),
        ("quire_sources.factory", {"torch", "numpy", "quire_engine", "quire_server", "quire_operator"}),
        ("quire_server.supervisor.supervisor", {"torch", "tokenizers", "quire_engine"}),
        ("quire_server.openai.__main__", {"torch", "tokenizers", "numpy", "aiohttp", "quire_engine"}),
        ("quire_operator.cli.main", {"torch", "numpy", "quire_engine", "quire_server"}),
    ],
)
def test_what_a_process_never_loads(module, absent):
    code = f"import sys, {module}; print(*sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_readme_names_exactly_two_commands_to_set_up():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_continuous_integration_runs_every_test_command():
    targets = re.findall(r"^(test[a-z-]*|emulated|e2e):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = re.findall(
        r"^(?:run|begin) \S+ (?:nice -n 10 )?make (.*)$", (ROOT / ".ci/run").read_text(), re.MULTILINE
    )
    assert set(targets) >= {"test", "test-server", "test-cluster"}
    # Its builds take 15 minutes.
    assert set(targets) - {"test-controllers"} <= set(" ".join(commands).split())


SKIPPED = """
import pytest, shutil
def test_program(): pytest.skip("jq is not installed")
def test_device(): pytest.skip("needs a CUDA device")
@pytest.mark.skipif(True, reason="chromium is not installed")
def test_marked(): pass
@pytest.mark.xfail(reason="known")
def test_known(): assert False
"""
SKIPPED_FILE = 'import pytest; pytest.importorskip("a_module_that_nobody_has", reason="needs a package")'


def test_only_allowed_skips_pass_in_ci(tmp_path, monkeypatch):
    (tmp_path / "test_some.py").write_text(SKIPPED)
    (tmp_path / "test_file.py").write_text(SKIPPED_FILE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--continue-on-collection-errors", "-rsxfE"]

    def outcome(ci):
        monkeypatch.setenv("CI", ci)
        argv = [*command, "--rootdir", tmp_path, "-c", "/dev/null", tmp_path]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).stdout

    assert "4 skipped, 1 xfailed in" in outcome("")
    said = outcome("true")
    assert "1 failed, 1 skipped, 1 xfailed, 2 errors in" in said
    for reason in ("jq is not installed", "chromium is not installed", "needs a package"):
        assert f"allow it in tests/conftest.py.\nSkipped: {reason}" in said
