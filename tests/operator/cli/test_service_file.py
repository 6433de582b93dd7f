# SPDX-License-Identifier: Apache-2.0
"""The file of a running `quire serve`: what takes effect, what needs a restart, and files with errors."""

import os
from functools import partial

import pytest

from quire_operator.cli import service_file
from quire_operator.cli.serve import ServeOptions
from quire_operator.cli.service_file import ServiceFile
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.errors import ConfigError, Unavailable

SPEC = """apiVersion: quire.dev/v1alpha1
kind: LLMService
metadata: {name: tales}
spec:
  device: CPU
  model: {source: {path: model}}
  adapters:
  - {name: one, source: {path: one}}
  adapterSources:
  - {path: prefix, allow: "web-*"}
"""


class Served:
    """A file that is served, and what the supervisor and the log get."""

    def __init__(self, folder):
        self.folder, self.file = folder, folder / "f.yaml"
        self.sent, self.logged, self.error = [], [], None
        self.write(SPEC)
        read = partial(service_file.read, str(self.file), ServeOptions(run_dir=folder / "run"), {})
        self.running = read()
        self.service_file = ServiceFile(self.file, read, self.running, self.send, self.logged.append)

    def send(self, catalog):
        if self.error is not None:
            raise self.error
        self.sent.append(catalog)

    def write(self, text):
        self.file.write_text(text)
        os.utime(self.file, ns=(0, os.stat(self.file).st_mtime_ns + 1))

    def change(self, old, new):
        assert old in self.file.read_text()
        self.write(self.file.read_text().replace(old, new))
        return self.polled()

    def polled(self):
        """Return the new lines of the log."""
        self.logged.clear()
        for _ in range(3):
            self.service_file.poll()
        return [line.replace(f"{self.folder}/", "") for line in self.logged]


@pytest.fixture
def served(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (tmp_path / name / file).write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "prefix").mkdir()
    return Served(tmp_path)


def test_adapters_and_their_sources_change(served):
    assert served.polled() == [] and served.sent == []
    prefix = served.running.launch_plan.catalog.sources[0]
    assert (prefix.path, prefix.allow, prefix.maxAdapters) == (str(served.folder / "prefix"), "web-*", 256)
    assert served.change("path: one", "path: two") == ["f.yaml: adapters: changed one"]
    assert served.change("adapters:\n", "adapters:\n  - {name: b, source: {path: two}}\n") == [
        "f.yaml: adapters: added b"
    ]
    assert served.change("  - {name: one, source: {path: two}}\n", "") == ["f.yaml: adapters: removed one"]
    assert served.change('"web-*"}', '"*", limit: {adapters: 3, size: 1Mi}}') == [
        "f.yaml: adapters: adapterSources now has 1 entries"
    ]
    sums = "  adapterSums: [{name: half, parts: [{adapter: b, weight: 0.5}]}]\n"
    assert served.change("  adapters:\n", f"{sums}  adapters:\n") == ["f.yaml: adapters: adapterSums now has 1 entries"]
    last = served.sent[-1]
    assert last.sum_by_name == {"half": "b:0.5"}
    assert [adapter.name for adapter in last.adapters] == ["b"]
    assert (last.sources[0].allow, last.sources[0].maxAdapters, last.sources[0].maxBytes) == ("*", 3, 2**20)
    assert AdapterCatalog.from_json(last.to_json()) == last
    assert len(served.sent) == 5


@pytest.mark.parametrize(
    ("old", "new", "fields"),
    [
        ("device: CPU", "device: CPU\n  engine: {maxModelLen: 64, maxNumSeqs: 3}",
         "spec.engine.maxModelLen, spec.engine.maxNumSeqs"),
        ("{source: {path: model}}", "{source: {path: model}, servedName: x}", "spec.model.servedName"),
        ("device: CPU", "device: CPU\n  openai: {enabled: false}", "spec.openai.enabled"),
        ("device: CPU", "device: CPU\n  lora: {maxRank: 8}", "spec.lora.maxRank"),
    ],
)  # fmt: skip
def test_what_needs_a_restart_is_named_in_one_line_and_the_adapters_still_change(served, old, new, fields):
    served.write(SPEC.replace("path: one", "path: two").replace(old, new))
    assert served.polled() == [
        f"f.yaml: restart quire serve to apply the change of {fields}",
        "f.yaml: adapters: changed one",
    ]
    served.write(SPEC.replace("path: one", "path: two"))
    assert served.polled() == [], "what runs is what the file says again"


@pytest.mark.parametrize("change", ["replicas: 3", "rollout: {maxSurge: 1}", "labels: {a: b}"])
def test_fields_of_a_cluster_have_no_effect(served, change):
    assert served.change("device: CPU", f"device: CPU\n  {change}") == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("kind: LLMService", "kind: [", "not YAML"),
        ("kind: LLMService", "kind: Other\n---\nkind: x", 'kind: "Other": must be LLMService'),
        ("path: one", "path: absent", "absent is not a folder"),
        ("path: prefix", "path: absent", "absent is not a folder"),
        ("path: prefix, allow", "path: prefix, s3: {uri: s3://bucket/x}, allow", "exactly one of"),
        ('"web-*"', '"web/*"', "a pattern with"),
        ("device: CPU", "device: CPU\n  lora: {maxLoaded: 0}", "lora.maxLoaded is 0"),
        (SPEC, "", "contains no LLMService"),
    ],
)
def test_a_file_with_an_error_changes_nothing(served, old, new, problem):
    [line] = served.change(old, new)
    assert line.startswith("f.yaml has an error, and nothing changes: ") and problem in line
    assert served.polled() == [] and served.sent == []
    served.write(SPEC)
    assert served.polled() == []


def test_a_file_that_is_removed_and_written_again(served):
    text = served.file.read_text()
    served.file.unlink()
    [line] = served.polled()
    assert "nothing changes" in line
    served.write(text.replace("path: one", "path: two"))
    assert served.polled() == ["f.yaml: adapters: changed one"]


def test_a_file_is_read_only_when_it_has_settled(served):
    served.write(SPEC.replace("path: one", "path: tw"))
    served.service_file.poll()
    served.write(SPEC.replace("path: one", "path: two"))
    assert served.polled() == ["f.yaml: adapters: changed one"]


def test_a_supervisor_that_starts_gets_the_adapters_later(served):
    served.error = Unavailable("it is starting")
    assert served.change("path: one", "path: two") == []
    served.error = None
    assert served.polled() == ["f.yaml: adapters: changed one"]
    served.error = ConfigError("'x' is a model of the model repository")
    assert served.change("path: two", "path: one") == [
        "f.yaml: the adapters do not change: 'x' is a model of the model repository"
    ]
    assert served.polled() == []
