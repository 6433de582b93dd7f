# SPDX-License-Identifier: Apache-2.0
"""The client of the admin port: which pods get a push, that no pod delays the others, and that the key does not leak.

The ports are scripted ones (support/fake_admin_api.py says why); real supervisors are in test_adapter_push.py.
"""

import asyncio
import logging
import time
from dataclasses import replace

import pytest
from aiohttp import web
from support.fake_admin_api import FakeAdminServers, FakePod
from support.observed_factories import desired_service, ready_pod, starting_pod

from quire_operator.controller.observe import pod_admin_client
from quire_operator.controller.observe.pod_admin_client import PodAdminClient, VisitResult
from quire_spec.dataclass_json import to_json
from quire_spec.documents.download_progress import DownloadProgress

KEY = "s3cret-key-of-the-admin-port"
SERVICE = desired_service()
CATALOGUE = SERVICE.build_catalog()


@pytest.fixture(scope="module")
def ports():
    with FakeAdminServers() as ports:
        yield ports


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_text(KEY)
    return path


@pytest.fixture
async def pusher():
    told = []
    made = PodAdminClient(
        total_timeout_s=20.0, unresponsive_timeout_s=20.0, record_visit=lambda exchange, _: told.append(exchange)
    )
    made.told = told
    yield made
    await made.close()


@pytest.fixture
def serve(ports, key_file):
    """A function that serves a scripted pod and gives the Pod that the operator sees."""
    opened = []

    def open_(name="s-0", host="127.0.0.1", **script):
        scripted = FakePod(**script)
        port = ports.open(scripted, host, key_file)
        opened.append((host, port, scripted))
        return scripted, ready_pod(name, ip=host, health_port=port)

    yield open_
    for host, port, scripted in opened:
        scripted.hangs = False
        if (host, port) in ports._runners:
            ports.close(host, port)


async def one(pusher, seen, catalogue=CATALOGUE, key=KEY):
    (found,) = await pusher.push_catalog([seen], catalogue, key)
    return found


async def test_a_pod_is_asked_told_and_asked_again(pusher, serve):
    scripted, seen = serve()
    found = await one(pusher, seen)
    assert scripted.pushed_catalogs == [CATALOGUE]
    assert found.report.catalogue == CATALOGUE.version.digest
    assert [a.name for a in found.report.adapters] == ["sql", "support"]
    assert (found.report_error, pusher.told) == ("", [VisitResult.PUSHED])
    again = await one(pusher, seen)
    assert scripted.pushed_catalogs == [CATALOGUE], "who works on it is not told again"
    assert again.report == found.report and pusher.told[-1] is VisitResult.ASKED


async def test_a_stale_catalogue_is_not_told_and_the_pods_word_stands(pusher, serve):
    newer = replace(CATALOGUE, generation=9, adapters=())
    scripted, seen = serve(catalog=newer)
    found = await one(pusher, seen)
    assert scripted.pushed_catalogs == [] and found.report.generation == 9 and found.report_error == ""


async def test_a_pod_that_was_told_something_newer_in_between_is_no_failure(pusher, serve):
    scripted, seen = serve()
    told = scripted.set_catalog

    def set_catalog(catalogue, replaces):
        scripted.catalog = replace(CATALOGUE, generation=9, adapters=())
        told(catalogue, replaces)

    scripted.set_catalog = set_catalog
    found = await one(pusher, seen)
    assert found.report.generation == 9 and found.report_error == "" and pusher.told == [VisitResult.AHEAD]


async def test_a_newer_catalogue_is_replaced_by_one_that_is_known_to_be_the_newest_there_is(pusher, serve):
    scripted, seen = serve(catalog=replace(CATALOGUE, generation=9, adapters=()))
    (found,) = await pusher.push_catalog([seen], CATALOGUE, KEY, replace_newer=True)
    assert found.report.generation == CATALOGUE.generation and scripted.catalog == CATALOGUE
    assert pusher.told == [VisitResult.PUSHED]
    await pusher.push_catalog([seen], CATALOGUE, KEY, replace_newer=True)
    assert len(scripted.pushed_catalogs) == 1


async def test_a_container_that_starts_anew_is_told_again(pusher, serve):
    scripted, seen = serve()
    before = await one(pusher, seen)
    scripted.restart()
    after = await one(pusher, seen)
    assert len(scripted.pushed_catalogs) == 2
    assert after.core_started_at != before.core_started_at
    assert after.report.catalogue == CATALOGUE.version.digest


async def test_a_pod_that_forgets_what_it_takes_is_told_once_a_visit_and_never_believed(pusher, serve):
    scripted, seen = serve(drops_catalog=True)
    for visits in (1, 2):
        found = await one(pusher, seen)
        assert len(scripted.pushed_catalogs) == visits
        assert found.report.catalogue != CATALOGUE.version.digest


async def test_a_refused_catalogue_is_told_beside_the_report(pusher, serve):
    _, seen = serve(put_fails=True)
    found = await one(pusher, seen)
    assert found.report is not None and "PUT /adapters: HTTP 500: internal error" in found.report_error
    assert pusher.told == [VisitResult.REFUSED]


async def test_a_wrong_key_is_named_and_not_shown(pusher, serve, caplog):
    _, seen = serve()
    with caplog.at_level(logging.DEBUG):
        found = await one(pusher, seen, key="another-key-that-is-wrong")
    assert found.report is None and "HTTP 401: the pod has another admin key" in found.report_error
    assert "another-key" not in found.report_error + caplog.text
    assert pusher.told == [VisitResult.UNAUTHORIZED]


async def test_nobody_listens(pusher):
    found = await one(pusher, ready_pod("s-0", ip="127.0.0.1", health_port=9))
    assert found.report is None and "127.0.0.1:9" in found.report_error
    assert pusher.told == [VisitResult.FAILED]


async def test_hanging_pods_hold_up_nobody(serve):
    pusher = PodAdminClient(max_pods=4, total_timeout_s=4.0, unresponsive_timeout_s=1.5)
    try:
        hanging = [serve(f"h-{i}", hangs=True)[1] for i in range(16)]
        good = [serve(f"g-{i}")[1] for i in range(4)]
        begun = time.monotonic()
        found = await pusher.push_catalog([*hanging, *good], CATALOGUE, KEY)
        assert time.monotonic() - begun < 12, "all at once: four at a time take 20"
        assert {p.report_error for p in found} == {
            "no response within 4 s",
            "not visited: too many pods do not respond",
        }
        # Now four are known for it, and do not take turns of others any more.
        hanging = [p for p in found if "no response" in p.report_error]
        assert len(hanging) == 4
        begun = time.monotonic()
        suspects = asyncio.create_task(pusher.push_catalog(hanging, CATALOGUE, KEY))
        await asyncio.sleep(0)
        assert all(p.report is not None for p in await pusher.push_catalog(good, CATALOGUE, KEY))
        assert not suspects.done(), "they are not waited for"
        assert all("no response within 4 s" in p.report_error for p in await suspects), "in the same words"
        assert time.monotonic() - begun < 4, "nor for long where they are of one service"
    finally:
        await pusher.close()


async def test_a_pod_that_is_slow_and_not_hung_is_heard_again(serve, monkeypatch):
    pusher = PodAdminClient(total_timeout_s=3.0, unresponsive_timeout_s=0.1)
    scripted, seen = serve(hangs=True)
    try:
        assert (await one(pusher, seen)).report is None
        scripted.hangs, scripted.delay_s = False, 0.15
        assert (await one(pusher, seen)).report is None, "it has a tenth of a second now"
        monkeypatch.setattr(pod_admin_client, "_FULL_TIMEOUT_INTERVAL_S", 0.0)
        assert (await one(pusher, seen)).report is not None
    finally:
        await pusher.close()


async def test_pods_that_cannot_answer_are_not_asked(pusher, serve):
    scripted, seen = serve()
    away = [
        starting_pod("pending"),
        replace(seen, deleting=True),
        replace(seen, ip=""),
        replace(seen, phase="Failed"),
        replace(seen, started_at=""),
    ]
    found = await pusher.push_catalog(away, CATALOGUE, KEY)
    assert scripted.num_status_requests == 0 and pusher.told == []
    assert all(p.report is None and p.report_error == "" for p in found)


async def strange(answer):
    """A pod that answers everything with `answer(request)`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, ready_pod("s-0", ip="127.0.0.1", health_port=runner.addresses[0][1])


async def _echo(request):
    return web.Response(status=418, text=f"you said {dict(request.headers)}")


async def _away(request):
    raise web.HTTPFound("http://127.0.0.2:9/steal")


async def _endless(request):
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(400):
        await response.write(b" " * 2**16)
    return response


async def _nonsense(request):
    return web.json_response({"generation": "seven"})


async def _no_json(request):
    return web.Response(text="[" * 100_000)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (_echo, "HTTP 418"),
        (_away, "HTTP 302"),
        (_endless, "more than 16777216 bytes"),
        (_nonsense, "its status document is invalid"),
        (_no_json, "its status document is invalid"),
    ],
)
async def test_what_a_pod_answers_is_not_trusted(pusher, answer, words, caplog):
    runner, seen = await strange(answer)
    try:
        with caplog.at_level(logging.DEBUG):
            found = await one(pusher, seen)
        assert found.report is None and words in found.report_error
        assert KEY not in found.report_error + caplog.text
        assert len(found.report_error) <= 300
        far = await one(pusher, replace(seen, downloading=True))
        assert far.progress is None and far.report_error == ""
    finally:
        await runner.cleanup()


async def test_a_pod_that_downloads_is_asked_how_far_it_is_and_never_shown_the_key(pusher):
    asked = []

    async def answer(request):
        asked.append((request.method, request.path, request.headers.get("Authorization")))
        return web.json_response(to_json(DownloadProgress(1, 4, 2)))

    runner, seen = await strange(answer)
    try:
        for started_at in ("", seen.started_at):
            found = await one(pusher, replace(seen, started_at=started_at, downloading=True))
            assert (found.progress, found.report, found.report_error) == (DownloadProgress(1, 4, 2), None, "")
        assert asked == [("GET", "/progress", None)] * 2 and pusher.told == [VisitResult.ASKED] * 2
        assert (await one(pusher, replace(found, deleting=True))).progress is None
    finally:
        await runner.cleanup()


async def test_the_error_of_a_rank_counts_once_it_was_lost_twice(pusher):
    document = {"node_rank": 1, "generation": 3, "state": "waiting", "last_error": "node 0 ended\nhere"}
    asked = []

    async def status(request):
        asked.append(request.headers["Authorization"])
        return web.json_response(document)

    app = web.Application()
    app.add_routes([web.get("/status", status)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        pod = replace(starting_pod("s-0-1", started_at="2026-01-01T00:00:00Z"), ip="127.0.0.1", health_port=port)
        for num_lost, error in ((1, ""), (2, "node 0 ended; here"), ("x", "")):
            document["num_groups_lost"] = num_lost
            (found,) = await pusher.read_ranks([pod], KEY)
            assert found.rank_error == error
        assert asked == [f"Bearer {KEY}"] * 3
        assert await pusher.read_ranks([replace(pod, ready=True)], KEY) == (replace(pod, ready=True),)
        assert len(asked) == 3
    finally:
        await runner.cleanup()
