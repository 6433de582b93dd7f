# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of adapters on a real server: the same text on all ports, beside plain adapters, within all limits."""

import concurrent.futures
import re
from pathlib import Path

import pytest
from support.quire_serve import example_document, run_concurrently, running_service

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
STORY = "Once upon a time"
GREEDY = {"temperature": 0.0, "max_tokens": 30}
SUM = "pirate:0.6,sql:-0.3"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    document = example_document()
    document["spec"]["lora"] = {"maxLoaded": 2, "maxRank": 32}
    parts = [{"adapter": "pirate", "weight": 0.6}, {"adapter": "sql", "weight": -0.3}]
    document["spec"]["adapterSums"] = [{"name": "calm", "parts": parts}]
    with running_service(document, tmp_path_factory.mktemp("sums")) as service:
        yield service


def complete(own, model):
    return own.request("openai", "/v1/completions", {"model": model, "prompt": STORY} | GREEDY)


def test_all_ports_give_the_same_text(own):
    text = own.text("tales", STORY, lora_name=SUM, **GREEDY)
    assert text not in {own.text(model, STORY, **GREEDY) for model in ("tales", "pirate", "sql")}
    (stream,) = run_concurrently(own.grpc_stream("tales", STORY, lora_name=SUM, **GREEDY))
    assert stream.text == text
    answer = complete(own, SUM)
    assert (answer.body["model"], answer.body["choices"][0]["text"]) == (SUM, text)
    assert own.text("tales", STORY, lora_name="pirate:1.0,sql:0", **GREEDY) == own.text("pirate", STORY, **GREEDY)
    assert own.text("tales", STORY, lora_name="pirate:0", **GREEDY) == own.text("tales", STORY, **GREEDY)


def test_a_sum_can_have_a_name(own):
    assert own.text("tales", STORY, lora_name="calm", **GREEDY) == own.text("tales", STORY, lora_name=SUM, **GREEDY)
    answer = complete(own, "calm")
    assert answer.body["choices"][0]["text"] == complete(own, SUM).body["choices"][0]["text"]
    assert "calm" in {card["id"] for card in own.request("openai", "/v1/models").body["data"]}
    assert re.search(r'quire_adapter_requests_total\{[^}]*adapter="calm"[^}]*\} 2', own.metrics())
    assert re.search(r'vllm:lora_adapter_loaded\{[^}]*adapter_name="calm"[^}]*level="gpu"', own.metrics())
    # The catalog changes without a restart: the name then stands for another sum, and later for none.
    own.put_adapters(catalog(own, [{"name": "calm", "parts": [{"adapter": "sql", "weight": 1.0}]}]))
    expected = own.text("sql", STORY, **GREEDY)
    own.wait(lambda: own.text("tales", STORY, lora_name="calm", **GREEDY) == expected, 10, "the other sum")
    own.put_adapters(catalog(own, []))
    own.wait(lambda: own.generate("tales", STORY, lora_name="calm", max_tokens=1).status == 400, 10, "no sum")


def catalog(own, sums):
    folders = {name: str(ROOT / "examples/adapters" / name) for name in ("pirate", "sql", "tools")}
    adapters = [{"name": name, "source": {"path": folder}} for name, folder in folders.items()]
    return {"generation": own.status()["generation"] + 1, "adapters": adapters, "sums": sums}


def test_sums_run_beside_plain_adapters(own):
    names = ["pirate", SUM, "sql", "pirate:0.5", "tools:1,pirate:0.1", "tools", "sql:2"] * 2
    expected = {name: own.text("tales", STORY, lora_name=name, **GREEDY) for name in names}
    streams = run_concurrently(*(own.http_stream("tales", STORY, lora_name=name, **GREEDY) for name in names))
    assert [stream.text for stream in streams] == [expected[name] for name in names]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pirate:0.5,none:0.5", "model 'none' is not served"),
        ("pirate:0.5,sql", "'sql' must be NAME:WEIGHT"),
        ("pirate:nan", "'pirate:nan' must be NAME:WEIGHT"),
        ("sql:1,tools:1,pirate:1", "the sum of the adapters' ranks is 40, but max_lora_rank is 32"),
    ],
)
def test_what_cannot_be_added_is_refused(own, name, message):
    answer = own.generate("tales", STORY, lora_name=name, **GREEDY)
    assert answer.status == 400 and message in str(answer.body)
    answer = complete(own, name)
    assert answer.status == (404 if "none" in name else 400) and message in str(answer.body)


def test_metrics_count_sums(own):
    own.text("tales", STORY, lora_name=SUM, **GREEDY)
    metrics = own.metrics()
    assert re.search(r'quire_adapter_requests_total\{[^}]*adapter="_other"[^}]*\} [1-9]', metrics)
    assert re.search(r"vllm:num_gpu_loaded_lora_adapters\{[^}]*\} 2", metrics)
    assert "pirate:" not in metrics
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        future = executor.submit(own.text, "tales", STORY, lora_name=SUM, max_tokens=900, ignore_eos=True)
        own.wait(lambda: "pirate:0.6+sql:-0.3" in own.metrics() or future.done(), 30, "running")
        assert not future.done()
        future.result()
