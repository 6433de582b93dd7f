# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md lists every metric of Quire that a running pod exports, with its type, labels and description."""

import re

import pytest
from nodocker_cluster.ports import free_ports
from prometheus_client.parser import text_string_to_metric_families
from support.quire_serve import ROOT, example_document, running_service

pytestmark = pytest.mark.server

PAGE = ROOT / "docs/metrics.md"
ROW = re.compile(r"^\| `(?P<name>[\w:]+)` \| (?P<kind>\w+) \| (?P<labels>.*?) \| (?P<about>.+) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Return metric families by query name, after traffic that gives every labelled family a sample.

    The service is not the shared one: series of an adapter end when another test replaces the catalog.
    """
    document = example_document()
    document["spec"]["engine"]["dataParallelSize"] = 2  # so that the series of each core exist
    document["spec"]["engine"]["kvCacheOffloading"] = {"memory": "8Mi"}
    folder = tmp_path_factory.mktemp("metrics")
    key_file = folder / "key"
    key_file.touch(0o600)
    key_file.write_text("k" * 32)
    flags = f"--kv-transfer-port={free_ports(1)[0]}", f"--kv-transfer-key-file={key_file}"
    with running_service(document, folder, *flags) as service:
        service.generate("sql", "Once upon a time", max_tokens=4, ignore_eos=True)
        service.generate("pirate", "Once upon a time", max_tokens=4, ignore_eos=True)
        service.generate("tales", "Once upon a time", lora_name="unknown")
        exported = list(text_string_to_metric_families(service.metrics()))
    families = [family for family in exported if family.name.startswith(("vllm:", "quire_"))]
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in families}


def test_page_lists_exactly_the_exported_metrics(families):
    # tests/operator/test_docs_are_consistent.py compares the operator's metrics with its registry.
    rows = {row["name"]: row for row in ROW.finditer(PAGE.read_text()) if not row["name"].startswith("quire_operator")}
    assert sorted(rows) == sorted(families)
    for name, family in families.items():
        row = rows[name]
        assert (row["kind"], row["about"]) == (family.type, family.documentation), name
        if family.samples:
            labels = set().union(*(sample.labels for sample in family.samples)) - {"le"}
            assert {label.strip("` ") for label in row["labels"].split(",") if label.strip()} == labels, name


def test_metrics_of_gateway_api_endpoint_pickers(families):
    """They read the newest sample of vllm:lora_requests_info, and the adapter names in its labels."""
    (sample,) = families["vllm:lora_requests_info"].samples
    assert set(sample.labels) == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    assert sample.labels["max_lora"] == "8", "as in the example, in each of two cores"
    assert sample.value > 1.7e9, "Unix seconds"
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        (sample,) = families[name].samples
        assert sample.labels == {"model_name": "tales"}
    (sample,) = families["vllm:cache_config_info"].samples
    assert {"block_size", "num_gpu_blocks"} <= set(sample.labels)


def test_adapter_metrics_exist_after_its_first_request(families):
    def value(name, **labels):
        family = families[name]
        matching = [s.value for s in family.samples if labels.items() <= s.labels.items() and "le" not in s.labels]
        return matching[0] if matching else None

    sql = {"adapter": "sql", "model_name": "tales"}
    assert value("quire_adapter_requests_total", **sql) >= 1
    assert value("quire_adapter_tokens_total", **sql) >= 4
    assert value("quire_adapter_slot_residency", **sql) == 1
    for name, extra in (("queue", {}), ("time_to_first_token", {}), ("load", {"to": "host"}), ("load", {"to": "slot"})):
        name, labels = f"quire_adapter_{name}_seconds", sql | extra
        assert [
            s for s in families[name].samples if s.name == f"{name}_count" and labels.items() <= s.labels.items()
        ], f"{name} {extra}: {families[name].samples}"
    assert value("quire_host_adapters") >= 2
    assert value("quire_host_adapter_bytes") > 0
