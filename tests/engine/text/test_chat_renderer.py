# SPDX-License-Identifier: Apache-2.0
"""Templates of adapters that loop, raise or end their process affect only their own conversations."""

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from support.chats import conversation
from support.quire_serve import command_line
from support.tokenizer import byte_level, save_tokenizer

from quire_engine.ipc.worker_pool import NUM_WORKERS
from quire_engine.text.chat_renderer import ChatRenderer
from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import MAX_ERROR_BYTES, InvalidArgument, Unavailable

CHAT = conversation({"role": "user", "content": "fox"})
LOOP = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"


@pytest.fixture
async def renderer(tmp_path: Path) -> AsyncIterator[ChatRenderer]:
    tokenizer = Tokenizer(save_tokenizer(byte_level(), tmp_path))
    files = ChatTemplateFiles("{{ messages[0].content }}", None, {})
    renderer = ChatRenderer(files, tokenizer, 1000, cpu_limit_s=1.0)
    renderer.start()
    try:
        async with asyncio.timeout(120):
            while len(workers()) < NUM_WORKERS:
                # On a busy machine, workers take longer to start than a request waits.
                with contextlib.suppress(Unavailable):
                    await renderer.render(CHAT, None)
                await asyncio.sleep(0.05)
            while renderer._workers._idle.qsize() < NUM_WORKERS:
                await asyncio.sleep(0.05)
        yield renderer
    finally:
        await renderer.aclose()
    assert not workers()


def workers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "quire_engine.text.render_worker" in command_line(p)]


def write(folder: Path, template: str) -> str:
    (folder / "adapter.jinja").write_text(template)
    return str(folder / "adapter.jinja")


async def test_an_endless_template_leaves_a_worker_to_others(renderer: ChatRenderer, tmp_path: Path) -> None:
    template = write(tmp_path, LOOP)
    endless = [asyncio.create_task(renderer.render(CHAT, template)) for _ in range(4)]
    await asyncio.sleep(0.2)
    for _ in range(5):
        assert await renderer.render(CHAT, None) == "fox"
        assert not all(task.done() for task in endless), "it did not wait for them"
        await asyncio.sleep(0.2)
    results = await asyncio.gather(*endless, return_exceptions=True)
    assert all(isinstance(result, InvalidArgument | Unavailable) for result in results), results
    del results, endless
    async with asyncio.timeout(5):
        while renderer._shares:
            gc.collect()  # tracebacks refer to frames, which refer to the share
            await asyncio.sleep(0.05)


async def test_an_error_of_a_template_is_short(renderer: ChatRenderer, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="messages: xxx") as error:
        await renderer.render(CHAT, write(tmp_path, "{{ raise_exception('x' * 20000000) }}"))
    assert len(str(error.value)) <= MAX_ERROR_BYTES


async def test_a_conversation_survives_the_end_of_its_worker(renderer: ChatRenderer) -> None:
    for worker in workers()[:1]:
        worker.send_signal(signal.SIGSTOP)
    tasks = [asyncio.create_task(renderer.render(CHAT, None)) for _ in range(NUM_WORKERS)]
    await asyncio.sleep(0.2)
    for worker in workers()[:1]:
        os.kill(worker.pid, signal.SIGKILL)
    assert await asyncio.gather(*tasks) == ["fox"] * NUM_WORKERS
