# SPDX-License-Identifier: Apache-2.0
"""The LLMService file of a running `quire serve`: what changes in it takes effect as on a cluster.

A process beside the supervisor watches the file. Changes of the adapters are sent to the supervisor. Fields that would
replace pods on a cluster are named in one line of the log, because they need a restart. A file with an error changes
nothing. Called by main.py.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_operator.api import crd
from quire_operator.api.field_effects import POD_FIELDS
from quire_operator.api.llmservice import LLMService
from quire_operator.api.yaml_manifest import Manifest
from quire_operator.cli import serve
from quire_spec.constants import SUPERVISOR_SOCKET
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.errors import QuireError, Unavailable
from quire_spec.protocol.client import Client
from quire_spec.protocol.messages import Hello

_POLL_S = 1.0
_PR_SET_PDEATHSIG = 1
_MAX_LISTED_NAMES = 10


@dataclass(frozen=True, slots=True)
class Content:
    """A valid file, and what it starts."""

    body: Mapping[str, Any]
    """The document, with the defaults of the CRD."""
    launch_plan: serve.LaunchPlan


def read(file: str, options: serve.ServeOptions, environment: Mapping[str, str]) -> Content:
    """Read and check a file.

    Raises:
        ConfigError: the file cannot be read, is not valid, or cannot run on this machine.
    """
    return content_of(crd.single_service(file), options, environment)


def content_of(manifest: Manifest, options: serve.ServeOptions, environment: Mapping[str, str]) -> Content:
    """Check a document; see `read`."""
    body = crd.require_valid(manifest)
    return Content(body, serve.prepare(manifest, LLMService.from_body(body), options, environment))


def watch(file: Path, read_file: Callable[[], Content], running: Content) -> None:
    """Start a process that watches the file as long as this process exists, which becomes the supervisor."""
    parent_pid = os.getpid()
    if os.fork():
        return
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Ctrl-C reaches all processes of the terminal. The supervisor ends in its own time, and this process with it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        service_file = ServiceFile(file, read_file, running, _send_to(running.launch_plan.run_dir))
        while os.getppid() == parent_pid:
            time.sleep(_POLL_S)
            service_file.poll()
    finally:
        os._exit(0)


def _send_to(run_dir: Path) -> Callable[[AdapterCatalog], None]:
    async def send(catalog: AdapterCatalog) -> None:
        client = Client(run_dir / SUPERVISOR_SOCKET, Hello("supervisor", pid=os.getpid()), "the supervisor")
        with contextlib.suppress(OSError):
            await client.connect()
        try:
            await client.call("replace_adapters", type(None), {"document": catalog.to_json()})
        finally:
            await client.close()

    return lambda catalog: asyncio.run(send(catalog))


class ServiceFile:
    """The file, what runs, and what was sent."""

    def __init__(
        self,
        file: Path,
        read_file: Callable[[], Content],
        running: Content,
        send: Callable[[AdapterCatalog], None],
        log: Callable[[str], None] = lambda line: print(f"quire: {line}", file=sys.stderr, flush=True),
    ) -> None:
        """`send` replaces the adapters of the supervisor; it raises Unavailable while the supervisor does not run."""
        self._file, self._read, self._running, self._send, self._log = file, read_file, running, send, log
        self._sent = running.launch_plan.catalog
        self._unsent: AdapterCatalog | None = None
        self._seen = self._read_stamp = _stamp(file)

    def poll(self) -> None:
        """Apply the file if it has changed, and has not changed since the last call."""
        stamp = _stamp(self._file)
        if stamp != self._seen:
            self._seen = stamp  # an editor may still be writing
            return
        if stamp != self._read_stamp:
            self._read_stamp = stamp
            self._apply()
        if self._unsent is not None:
            self._send_adapters(self._unsent)

    def _apply(self) -> None:
        try:
            content = self._read()
        except QuireError as error:
            problems = "; ".join(str(error).splitlines())
            self._log(f"{self._file} has an error, and nothing changes: {problems}")
            return
        if fields := self._fields_that_need_a_restart(content):
            self._log(f"{self._file}: restart quire serve to apply the change of {', '.join(fields)}")
        self._unsent = content.launch_plan.catalog

    def _send_adapters(self, catalog: AdapterCatalog) -> None:
        if catalog == self._sent:
            self._unsent = None
            return
        try:
            self._send(catalog)
        except Unavailable:
            return  # the supervisor is starting, and the next poll tries again
        except QuireError as error:
            self._log(f"{self._file}: the adapters do not change: {error}")
        else:
            self._log(f"{self._file}: {_describe(self._sent, catalog)}")
            self._sent = catalog
        self._unsent = None

    def _fields_that_need_a_restart(self, content: Content) -> list[str]:
        """Return the fields that differ from what runs, if they have an effect on this machine."""
        if _without_catalog(content.launch_plan) == _without_catalog(self._running.launch_plan):
            return []
        old, new = self._running.body, content.body
        fields = [
            path
            for name in POD_FIELDS
            for path in _changed(old["spec"].get(name), new["spec"].get(name), f"spec.{name}")
        ]
        return fields or ["metadata.name" if old["metadata"]["name"] != new["metadata"]["name"] else "spec"]


def _without_catalog(plan: serve.LaunchPlan) -> tuple[Any, ...]:
    return plan.config, plan.chat_template, plan.environment, plan.run_dir


def _changed(old: Any, new: Any, path: str) -> Iterator[str]:
    """Yield the paths of the fields that differ. A list counts as one field."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from _changed(old.get(name), new.get(name), f"{path}.{name}")
    elif old != new:
        yield path


def _describe(old: AdapterCatalog, new: AdapterCatalog) -> str:
    """Return the changes of the adapters in one line."""
    before, after = ({adapter.name: adapter for adapter in catalog.adapters} for catalog in (old, new))
    names = {
        "added": [name for name in after if name not in before],
        "changed": [name for name in after if name in before and after[name] != before[name]],
        "removed": [name for name in before if name not in after],
    }
    parts = [f"{what} {_list(listed)}" for what, listed in names.items() if listed]
    if old.sources != new.sources:
        parts.append(f"adapterSources now has {len(new.sources)} entries")
    if old.sums != new.sums:
        parts.append(f"adapterSums now has {len(new.sums)} entries")
    return "adapters: " + ("; ".join(parts) or "another order")


def _list(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED_NAMES
    return ", ".join(names[:_MAX_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when the file does; None if it does not exist."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
