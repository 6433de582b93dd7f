# SPDX-License-Identifier: Apache-2.0
"""Prepares a batch on this machine.

It locks the run folder, fetches the adapters, starts the engine and connects to the text process.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from quire_server.adapters.fetcher import AdapterFetcher, AdapterTrust
from quire_server.batch.local_endpoint import LocalEndpoint
from quire_server.batch.local_engine import LocalEngine, fetch_adapters
from quire_server.downloads.adapter_cache import AdapterCache
from quire_server.downloads.model_trust import verify_models
from quire_server.logs import LogRelay
from quire_server.openai.text_client import TextClient
from quire_server.supervisor import run_dir
from quire_server.supervisor.child_process import become_subreaper
from quire_sources.factory import SourceOptions
from quire_sources.readers.blocking import run_in_daemon_thread
from quire_spec import constants
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.pod_config import PodConfig


@contextlib.asynccontextmanager
async def open_local_endpoint(args: argparse.Namespace) -> AsyncIterator[tuple[LocalEndpoint, int]]:
    """Start the engine that the command line describes.

    Yield its endpoint, and the number of requests that must be open to keep the engine fully utilized.

    Raises:
        ConfigError: a document, a folder or an adapter is invalid.
        StartupFailed: a process did not start.
    """
    config = PodConfig.load(args.config)
    catalog, sources = AdapterCatalog.load(config.adapters), config.sources
    become_subreaper()
    options = SourceOptions(sources.secretsDir, sources.claims, sources.allowPaths)
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(run_dir.locked_run_dir(args.run_dir))
        await run_in_daemon_thread(verify_models, config)
        trust = AdapterTrust.of(config.trust)
        fetcher = await stack.enter_async_context(AdapterFetcher(AdapterCache(args.cache_dir), options, trust=trust))
        cached_adapter_by_name = await fetch_adapters(catalog, config.servedName, fetcher)
        relay = LogRelay(True) if args.verbose else _drop
        engine = LocalEngine(args.config.absolute(), folder, cached_adapter_by_name, relay)
        client = TextClient(folder / constants.TEXT_SOCKET)
        await stack.enter_async_context(_running(engine.run(), client.run()))
        await engine.wait_ready()
        # Twice as many requests are sent as can run at the same time. When a sequence ends, the next request is already
        # tokenized.
        max_inflight = max(1, min(2 * config.engine.max_num_seqs, config.engine.max_num_queued_reqs))
        yield LocalEndpoint(engine, client, folder, config.servedName), max_inflight


@contextlib.asynccontextmanager
async def _running(*coroutines: Awaitable[Any]) -> AsyncIterator[None]:
    """Run the coroutines in the background. If one of them raises an error, the context ends with this error."""

    async def run(coroutine: Awaitable[Any]) -> None:
        await coroutine

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(coroutine)) for coroutine in coroutines]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None


def _drop(name: str, line: str) -> None:
    """Ignore a line that a process printed.

    If a process does not start, the error still contains its last lines.
    """
