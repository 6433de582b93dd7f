# SPDX-License-Identifier: Apache-2.0
"""One adapter on this pod: its progress, and the running fetch. The adapter manager reports the events."""

import asyncio
import logging
from dataclasses import dataclass, field

from quire_server.adapters.adapter_progress import AdapterProgress, Event, transition
from quire_server.adapters.fetcher import CachedAdapter
from quire_spec.constants import AdapterName
from quire_spec.documents.pod_status import AdapterState, AdapterStatus, ContentStatus, utc_now
from quire_spec.documents.sources import Source
from quire_spec.errors import QuireError
from quire_spec.protocol.results import AdapterCheck

logger = logging.getLogger(__name__)


def no_effect_text(check: AdapterCheck) -> str:
    """Return the message about an adapter whose effect probe found no effect."""
    return (
        f"NoEffect: in the effect probe, the adapter changes no log probability by more than {check.effect:.3g}, so it "
        "answers like the base model; check that B was trained, and lora_alpha"
    )


@dataclass(slots=True, eq=False)
class ManagedAdapter:
    """One adapter of a pod."""

    name: AdapterName
    progress: AdapterProgress
    on_demand: bool = False
    """True if a request named the adapter, and the catalog does not contain it."""
    since: str = field(default_factory=utc_now)
    """Time at which the state last changed."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if the adapter must be reconciled again."""
    _fetch: "tuple[Source, asyncio.Task[CachedAdapter]] | None" = None
    """The running fetch."""

    def apply(self, event: Event) -> None:
        """Change the progress, and log a change of the state."""
        before, self.progress = self.progress, transition(self.progress, event)
        if self.progress.state is not before.state:
            self.since = utc_now()
        elif self.error == self._error_of(before):
            return
        level, suffix = (logging.WARNING, f" error={self.error}") if self.error else (logging.INFO, "")
        logger.log(level, "adapter name=%s state=%s%s", self.name, self.progress.state.value, suffix)

    async def fetch(self, source: Source, task: "asyncio.Task[CachedAdapter]") -> CachedAdapter:
        """Wait for a fetch of `source`, which `cancel_other_fetch` can cancel."""
        self._fetch = source, task
        try:
            return await task
        finally:
            self._fetch = None

    def cancel_other_fetch(self) -> None:
        """Cancel the running fetch if its source is not the desired one any more."""
        desired = self.progress.desired
        if self._fetch is not None and (desired is None or desired.source != self._fetch[0]):
            self._fetch[1].cancel()

    @property
    def error(self) -> str:
        """Reason of the state Failed, for the author of the catalog; empty in other states."""
        return self._error_of(self.progress)

    def status(self) -> AdapterStatus:
        """Return the adapter's entry in the status document."""
        progress = self.progress
        content = progress.active or progress.latest
        model = self.name if progress.exposed else None
        digest = content.digest if content else None
        effect = progress.check.effect if progress.check else None
        return AdapterStatus(
            self.name,
            progress.state,
            self.since,
            digest,
            model,
            self.error,
            effect,
            self._warning(progress),
            signer=content.signer if content else None,
        )

    def content_status(self) -> ContentStatus:
        """Return the status of a version or of a held content."""
        status = self.status()
        return ContentStatus(status.state, status.digest, status.error, status.effect, status.warning)

    def failure(self) -> QuireError | None:
        """Return the error of the state Failed; None in other states."""
        failure = self.progress.failure
        return failure.error if failure is not None and self.progress.state is AdapterState.FAILED else None

    def _warning(self, progress: AdapterProgress) -> str:
        if progress.check is None or progress.check.has_effect or self.error:
            return ""
        return no_effect_text(progress.check)

    def _error_of(self, progress: AdapterProgress) -> str:
        if progress.failure is None or progress.state is not AdapterState.FAILED:
            return ""
        # The name replaces the path of the folder, which means nothing to a reader.
        folder = progress.latest and str(progress.latest.folder)
        error = str(progress.failure.error)
        text = error.replace(folder, self.name) if folder else error
        is_served = progress.active is not None and progress.active != progress.latest
        return f"{text} (still serving {progress.active.digest})" if progress.active and is_served else text
