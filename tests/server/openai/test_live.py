# SPDX-License-Identifier: Apache-2.0
"""The live page: what it may load and show, who can read its events, and the page itself in a browser."""

import base64
import hashlib
import http.client
import json
import re

import pytest
from support.browser import requires_chromium, running_browser
from support.engine_processes import wait_for
from support.openai_front import running_front

from quire_server.openai.live import routes

KEY = "sk-live-test"
SECRET = "the purple hippopotamus"
HOSTILE = "<img src=x onerror=\"document.title='hacked'\">"
PAGE_BYTES = 34 * 2**10


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    (folder / "keys").mkdir()
    (folder / "keys" / "alice").write_text(KEY)
    with running_front(folder / "run", {"live": True, "apiKeysDir": folder / "keys"}) as front:
        yield front


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with running_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


class Watcher:
    """An open connection to the events."""

    def __init__(self, front, key=KEY):
        self.connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
        self.connection.request("GET", "/live/events", headers={"Authorization": f"Bearer {key}"})
        self.response = self.connection.getresponse()

    def next(self):
        while not (line := self.response.readline()).startswith(b"data: "):
            assert line, "the stream ended"
        return json.loads(line[6:])

    def close(self):
        self.response.close()
        self.connection.close()


def test_the_policy_allows_the_page_alone(live):
    page = live.request("/live")
    assert page.status == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    for directive, element in (("script-src", "script"), ("style-src", "style")):
        [content] = re.findall(rf"<{element}>(.*?)</{element}>", page.body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert len(page.body) < PAGE_BYTES
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(|https?://|\son\w+=", page.body)


def test_the_page_is_served_only_if_it_is_enabled(front):
    assert front.request("/live").status == front.request("/live/events").status == 404


def test_events_need_the_key_in_a_header(live):
    assert live.request("/live/events").status == live.request(f"/live/events?key={KEY}").status == 401


def test_a_snapshot_shows_counts_and_no_text_of_requests(live):
    watcher = Watcher(live)
    with live.client(KEY) as client:
        stream = client.completions.create(
            model="base", prompt=SECRET, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        while (snapshot := watcher.next())["requests"]["running"] != 1:
            pass
        stream.close()
    watcher.close()
    assert SECRET not in json.dumps(snapshot)
    [(owner, num_blocks)] = snapshot["owners"]
    assert owner == "base" and 0 < num_blocks <= snapshot["kv_cache"]["used"] < snapshot["kv_cache"]["blocks"]
    assert snapshot["states"] == {"rows": 0, "used": 0, "snapshots": 0}
    assert snapshot["counters"]["prompt_tokens_total"] > 0


def test_watchers_are_bounded_and_their_end_is_noticed(live):
    watchers = [Watcher(live) for _ in range(routes.MAX_WATCHERS)]
    assert all(watcher.next()["model"] == "base" for watcher in watchers)
    rejected = Watcher(live)
    assert rejected.response.status == 503
    for watcher in (*watchers, rejected):
        watcher.close()

    def is_accepted():
        watcher = Watcher(live)
        watcher.close()
        return watcher.response.status == 200

    wait_for(is_accepted, what="a free place")


def test_sigterm_ends_the_streams(live):
    watcher = Watcher(live)
    watcher.next()
    live.process.terminate()
    # An aborted response would raise IncompleteRead.
    watcher.response.read()
    watcher.close()
    assert live.process.wait(20) == 0
    live.start()


def test_events_outlive_the_core(live):
    watcher = Watcher(live)
    assert "unavailable" not in watcher.next()
    live.engine.kill("core")
    while "restarting" not in watcher.next().get("unavailable", ""):
        pass
    live.engine.start("core")
    while "unavailable" in watcher.next():
        pass
    watcher.close()


ANSWERS = "[...document.querySelectorAll('.assistant .body')].map((body) => body.textContent)"
IS_ANSWERED = "!answering && document.querySelectorAll('.assistant').length"


def open_page(live, browser):
    """Open the page in a tab without conversations, and enter the key if the tab does not have it."""
    browser.open(f"{live.url}/live")
    browser.run("sessionStorage.removeItem('quire-chats'); location.reload()")
    browser.run("sessionStorage.setItem('quire-key', arguments[0]); location.reload()", KEY)
    browser.wait("document.getElementById('state').className === 'on'", "the first event")
    browser.wait("document.getElementById('models').length", "the models")
    browser.run("document.getElementById('max-tokens').value = 12; document.getElementById('temperature').value = 0")
    browser.run("document.getElementById('prompt').focus()")


@requires_chromium
def test_the_page_in_a_browser(live, browser, tmp_path):
    browser.open(f"{live.url}/live")
    browser.wait("!document.getElementById('login').hidden", "the question for a key")
    enter = "document.getElementById('key').value = arguments[0]; document.getElementById('key-form').requestSubmit()"
    browser.run(enter, "wrong")
    browser.wait("document.getElementById('state').textContent === 'needs an API key'", "the rejection of the key")
    # The browser reports each response with 401 as an error.
    assert all("401" in problem for problem in browser.problems())
    browser.run(enter, KEY)
    browser.wait("document.getElementById('state').className === 'on'", "the first event")
    browser.wait("document.getElementById('models').length", "the models")
    assert browser.run("return [document.title, location.search]") == ["base · Quire live", ""]
    assert browser.run("return document.getElementById('grid').childElementCount") == 400
    for width in (1280, 390):
        browser.resize(width, 900, dark=width == 390)
        assert browser.run("return document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
        is_visible = "return ['chat', 'engine'].map((id) => document.getElementById(id).offsetParent !== null)"
        assert browser.run(is_visible) == [True, width == 1280]
    browser.run("document.querySelector('#views [data-view=engine]').click()")
    assert browser.run(is_visible) == [False, True]
    browser.screenshot(tmp_path / "live.png")
    browser.resize(1280, 900)
    assert browser.problems() == []


@requires_chromium
def test_a_conversation_by_keyboard(live, browser):
    open_page(live, browser)
    bodies = "window.bodies = []; const real = fetch; window.fetch = (url, options) => {"
    browser.run(f"{bodies} if (options.body) bodies.push(JSON.parse(options.body)); return real(url, options) }}")
    browser.run("document.getElementById('system').value = 'Be brief'; document.getElementById('system')"
                ".dispatchEvent(new Event('input'))")  # fmt: skip
    browser.type("Hello")
    browser.press("Enter", shift=True)
    browser.type("there")
    browser.press("Enter")
    browser.wait(IS_ANSWERED, "an answer")
    [first] = browser.run(f"return {ANSWERS}")
    browser.type("And?")
    browser.press("Enter")
    browser.wait("!answering && document.querySelectorAll('.assistant').length === 2", "the second answer")
    system = {"role": "system", "content": "Be brief"}
    question = {"role": "user", "content": "Hello\nthere"}
    turns = [question, {"role": "assistant", "content": first}, {"role": "user", "content": "And?"}]
    assert [body["messages"] for body in browser.run("return bodies")] == [[system, question], [system, *turns]]
    assert browser.run("return bodies[0].model") == "base" and browser.run("return bodies[0].max_tokens") == 12
    note = browser.run("return document.querySelector('.tools .note').textContent")
    assert re.search(r"[1-9]\d* tokens, first after", note), note
    browser.run("document.querySelectorAll('.again')[1].click()")
    browser.wait("!answering && bodies.length === 3", "the answer again")
    assert browser.run("return bodies[1]") == browser.run("return bodies[2]")
    answers = browser.run(f"return {ANSWERS}")
    browser.run("document.getElementById('new').click()")
    assert browser.run(f"return {ANSWERS}") == []
    # The tab keeps its conversations when it is loaded again.
    browser.run("location.reload()")
    browser.wait("document.getElementById('models').length", "the models")
    assert browser.run(f"return {ANSWERS}") == answers
    assert browser.run("return document.getElementById('system').value") == "Be brief"
    browser.run("document.getElementById('show-past').click()")
    browser.press("Tab")
    browser.press("Enter")  # on the button that deletes it
    browser.wait("document.querySelectorAll('article').length === 0", "the deletion")
    assert browser.run("return JSON.parse(sessionStorage.getItem('quire-chats'))") == []
    assert browser.problems() == []


@requires_chromium
def test_an_answer_is_stopped_and_copied(live, browser):
    open_page(live, browser)
    browser.command("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.run("document.getElementById('max-tokens').value = 1900; document.getElementById('temperature').value = 2")
    browser.run("document.getElementById('route').value = 'completion'")
    browser.type("Once upon a time")
    browser.press("Enter")
    browser.wait(f"{ANSWERS}.join('').length > 20", "the start of an answer")
    browser.press("Escape")
    browser.wait("!answering", "the end of the answer")
    live.engine.wait_idle()
    assert "stopped" in browser.run("return document.querySelector('.tools .note').textContent")
    browser.run("document.querySelector('.tools button').click()")
    browser.wait("document.querySelector('.tools button').textContent === 'Copied'", "the copy")
    browser.press("ArrowUp")
    assert browser.run("return document.getElementById('prompt').value") == "Once upon a time"
    # A message that the server rejects comes back, with the reason.
    browser.run("document.getElementById('max-tokens').value = -1; answer()")
    browser.wait("document.getElementById('problem').textContent", "the reason")
    assert "max_tokens" in browser.run("return document.getElementById('problem').textContent")
    assert browser.run("return document.getElementById('prompt').value") == "Once upon a time"
    assert browser.run("return document.querySelectorAll('article').length") == 2
    assert all("400" in problem for problem in browser.problems())


@requires_chromium
def test_names_and_output_are_text(live, browser):
    """A hostile state and a hostile answer, past the front, which accepts no such names."""
    browser.open(f"{live.url}/live")
    row = {"name": HOSTILE, "is_base": False, "state": HOSTILE, "slot": None, "running": 1, "waiting": 0}
    state = {
        "time": 1, "version": HOSTILE, "model": HOSTILE, "requests": {"running": 1, "waiting": 0, "open": 1},
        "kv_cache": {"blocks": 10, "used": 3}, "swap": {"blocks": 0, "used": 0}, "owners": [[HOSTILE, 9]],
        "states": {"rows": 9, "used": 2, "snapshots": 3},
        "cores": [], "adapters": [row], "num_adapters": 1, "host_adapter_bytes": 0, "counters": {},
    }  # fmt: skip
    # In one script, because the next event of the engine draws its own state.
    script = "draw(arguments[0]); return arguments[1].map((id) => document.getElementById(id).textContent)"
    shown = browser.run(f"{script}.concat([document.title])", state, ["states", "model", "owners", "rows"])
    assert shown[:2] == ["States: 2 of 9 in use, 3 snapshots", HOSTILE]
    assert all(HOSTILE in text for text in shown[2:])
    delta = {"content": f"{HOSTILE}\n```html\n{HOSTILE}\n```\n", "reasoning": HOSTILE}
    events = f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': 'stop'}]})}\n\ndata: [DONE]\n\n"
    browser.run("document.getElementById('models').replaceChildren(new Option(arguments[0]))", HOSTILE)
    ask = "window.fetch = async () => new Response(arguments[0]); show(newChat()); ask(arguments[1])"
    browser.run(ask, events, HOSTILE)
    browser.wait("!answering && document.querySelector('pre')", "the answer")
    texts = "return ['.user', '.who', 'details div', '.assistant .body', 'pre', '#past li'].map((s) => document"
    for shown in browser.run(f"{texts}.querySelector(s).textContent)"):
        assert HOSTILE in shown
    assert browser.run("return document.querySelectorAll('img').length") == 0
    # A script of another origin, or one that was added, does not run.
    browser.run("const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)")
    assert browser.run("return window.ran === undefined")
    assert any("Content Security Policy" in problem for problem in browser.problems())
