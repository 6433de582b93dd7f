# SPDX-License-Identifier: Apache-2.0
"""Adapters come and go while the service runs; a broken one disturbs nobody."""

import json
import shutil

import psutil
import pytest
from support.quire_serve import EXAMPLES, example_document, run_concurrently, running_service

pytestmark = pytest.mark.server

STORY = "Once upon a time"
GREEDY = {"temperature": 0.0, "max_tokens": 40}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    document = example_document()
    document["spec"]["lora"]["maxCached"] = 64
    with running_service(document, folder) as service:
        yield service


def catalogue(generation, **folders):
    adapters = [{"name": name, "source": {"path": str(path)}} for name, path in folders.items()]
    return {"generation": generation, "adapters": adapters}


def test_life_of_adapters(own, tmp_path):
    """Added, replaced under the same name, removed: each seen by clients, none with a restart."""
    pids = {name: own.pid(name) for name in ("core", "text", "server")}
    generation = own.status()["generation"]
    pirate, sql = EXAMPLES / "adapters/pirate", EXAMPLES / "adapters/sql"
    by_name = {name: own.text(name, STORY, **GREEDY) for name in ("pirate", "sql")}

    answer = own.put_adapters(catalogue(generation + 1, pirate=pirate, sql=sql, other=pirate))
    assert answer.status in (200, 202), answer
    took = own.wait(lambda: own.adapter("other").get("state") == "Ready", 15, "loaded")
    assert took < 10
    assert own.text("other", STORY, **GREEDY) == by_name["pirate"]

    own.put_adapters(catalogue(generation + 2, pirate=pirate, sql=sql, other=sql))
    digest = own.adapter("sql")["digest"]
    own.wait(
        lambda: own.adapter("other").get("digest") == digest and own.adapter("other")["state"] == "Ready", 15, "new"
    )
    assert own.text("other", STORY, **GREEDY) == by_name["sql"]

    own.put_adapters(catalogue(generation + 3, pirate=pirate, sql=sql))
    own.wait(lambda: not own.adapter("other"), 15, "gone")
    own.wait(lambda: own.generate("other", STORY, max_tokens=2).status in (400, 404), 5, "refused")
    assert own.put_adapters(catalogue(generation + 1, pirate=pirate)).status == 409
    assert pids == {name: own.pid(name) for name in pids}


def test_a_broken_adapter_says_why_and_disturbs_nobody(own, tmp_path):
    generation = own.status()["generation"]
    pirate, sql = EXAMPLES / "adapters/pirate", EXAMPLES / "adapters/sql"
    wrong = tmp_path / "wrong"
    shutil.copytree(pirate, wrong)
    config = json.loads((wrong / "adapter_config.json").read_text())
    config["r"] = config["r"] * 2
    (wrong / "adapter_config.json").write_text(json.dumps(config))
    torn = tmp_path / "torn"
    shutil.copytree(pirate, torn)
    (torn / "adapter_model.safetensors").write_bytes((pirate / "adapter_model.safetensors").read_bytes()[:5000])
    folders = {"wrong": wrong, "torn": torn, "absent": tmp_path / "absent"}
    own.put_adapters(catalogue(generation + 1, pirate=pirate, sql=sql, **folders))
    for name in folders:
        own.wait(lambda name=name: own.adapter(name).get("state") == "Failed", 15, f"{name} failed")
        assert own.adapter(name)["error"], name
    assert "shape" in own.adapter("wrong")["error"]
    assert own.health()[0] == 200
    assert own.text("pirate", STORY, **GREEDY)
    answer = own.generate("tales", STORY, lora_name="wrong")
    assert answer.status == 400
    assert "wrong" in answer.body["error"]


def test_fifty_adapter_models_are_ready_within_15_seconds(own):
    """Of a machine's time that others leave: a stub costs 0.14 s of a processor."""
    folders = {f"many-{i}": EXAMPLES / "adapters" / ("pirate", "sql")[i % 2] for i in range(50)}
    of_all, ours = machine_s(), own.cpu_seconds()
    own.put_adapters(catalogue(own.status()["generation"] + 1, **folders))
    wanted = {"tales", *folders}
    took = own.wait(lambda: set(own.status()["models"]) == wanted, 60, "serving 50 adapters")
    others = (machine_s() - of_all) - (own.cpu_seconds() - ours)
    alone = took - others / psutil.cpu_count()
    print(f"\n50 adapter models ready after {took:.1f} s, {alone:.1f} s without what others computed meanwhile")
    assert alone < 15
    streams = run_concurrently(*(own.http_stream(name, STORY, **GREEDY) for name in folders), timeout=120)
    assert [s.error for s in streams] == [None] * 50
    assert len({s.text for s in streams}) == 2


def machine_s():
    """Processor seconds that the machine has spent so far, for whomever."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice  # guests' are among the users'
