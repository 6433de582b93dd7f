# SPDX-License-Identifier: Apache-2.0
"""One adapter of the catalogue on this pod: what is wanted of it and where it is. adapters.py moves it."""

import asyncio
import logging
from dataclasses import dataclass, field

from quire_server.adapters.fetcher import CachedAdapter
from quire_spec.documents.adapter_catalog import AdapterSpec, Source
from quire_spec.documents.pod_status import AdapterState, AdapterStatus, utc_now
from quire_spec.errors import QuireError

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ManagedAdapter:
    """One adapter of the catalogue and where it is."""

    name: str
    desired: AdapterSpec | None
    """None: it is on its way out."""
    exposed: bool
    generation: int = 0
    """Rises with each catalogue: the source is to be looked at again."""
    observed_generation: int = -1
    """What `asked` was when the source was looked at last."""
    latest: CachedAdapter | None = None
    """What the catalogue's source holds."""
    latest_source: Source | None = None
    active: CachedAdapter | None = None
    """What the name stands for; the one before, while a replacement is on its way or has failed."""
    state: AdapterState = AdapterState.FETCHING
    since: str = field(default_factory=utc_now)
    error: str = ""
    permanent_failure: bool = False
    """Wrong in itself: nothing is tried until the catalogue changes."""
    failures: int = 0
    access_denied: bool = False
    """The source did not let us in, by a Secret that was as `secret_mark` says."""
    secret_version: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    fetch_task: "asyncio.Task[CachedAdapter] | None" = None
    fetch_source: Source | None = None

    def set_state(self, state: AdapterState, error: str = "") -> None:
        """Enter a state; staying in one keeps its time."""
        if (state, error) != (self.state, self.error):
            logger.log(
                logging.WARNING if error else logging.INFO,
                "adapter name=%s state=%s%s",
                self.name,
                state.value,
                f" error={error}" if error else "",
            )
        if state is not self.state:
            self.since = utc_now()
        self.state, self.error = state, error

    def status(self) -> AdapterStatus:
        """For the status document."""
        content = self.active or self.latest
        model = self.name if self.exposed else None
        return AdapterStatus(self.name, self.state, self.since, content.digest if content else None, model, self.error)

    def describe_error(self, error: QuireError) -> str:
        """An error for whoever wrote the catalogue: they know the adapter by its name, not by a folder of the cache."""
        folder = self.latest and str(self.latest.folder)
        text = str(error).replace(folder, self.name) if folder else str(error)
        return f"{text} (still serving {self.active.digest})" if self.active and self.active != self.latest else text

    @property
    def is_settled(self) -> bool:
        """True when nothing more is to be expected for now."""
        return self.state in (AdapterState.READY, AdapterState.FAILED)
