# SPDX-License-Identifier: Apache-2.0
"""The desired state and the actual state of one adapter on this pod. The adapter manager changes both states."""

import asyncio
import logging
from dataclasses import dataclass, field

from quire_server.adapters.fetcher import CachedAdapter
from quire_spec.constants import AdapterName
from quire_spec.documents.adapter_catalog import AdapterSpec, Source
from quire_spec.documents.pod_status import AdapterState, AdapterStatus, utc_now
from quire_spec.errors import QuireError

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ManagedAdapter:
    """The desired state and the actual state of one adapter."""

    name: AdapterName
    desired: AdapterSpec | None
    """The adapter's entry in the catalog. None while the adapter is being removed."""
    exposed: bool
    revision: int = 0
    """Number that increases with each new catalog. After an increase, the source must be checked again."""
    observed_revision: int = -1
    """The value of `revision` when the source was last checked."""
    latest: CachedAdapter | None = None
    """The content of the catalog's source when it was last fetched."""
    latest_source: Source | None = None
    active: CachedAdapter | None = None
    """The content that is used for requests with this name. While a replacement is loading, and after a replacement has
    failed, this is the previous content."""
    state: AdapterState = AdapterState.FETCHING
    since: str = field(default_factory=utc_now)
    error: str = ""
    failure: QuireError | None = None
    """Error of the last failure."""
    permanent_failure: bool = False
    """True if the adapter is invalid. In this case, there is no retry until the catalog changes."""
    failures: int = 0
    access_denied: bool = False
    """True if the source rejected the credentials of the Secret. `secret_version` is the Secret's version at that
    time."""
    secret_version: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    fetch_task: "asyncio.Task[CachedAdapter] | None" = None
    fetch_source: Source | None = None

    def set_state(self, state: AdapterState, error: str = "") -> None:
        """Set state and error. `since` is only changed if the state changes."""
        if (state, error) != (self.state, self.error):
            level, suffix = (logging.WARNING, f" error={error}") if error else (logging.INFO, "")
            logger.log(level, "adapter name=%s state=%s%s", self.name, state.value, suffix)
        if state is not self.state:
            self.since = utc_now()
        self.state, self.error = state, error

    def status(self) -> AdapterStatus:
        """Return the adapter's entry in the status document."""
        content = self.active or self.latest
        model = self.name if self.exposed else None
        return AdapterStatus(self.name, self.state, self.since, content.digest if content else None, model, self.error)

    def describe_error(self, error: QuireError) -> str:
        """Return an error message for the author of the catalog.

        In the message, the adapter's name replaces the path of its folder.
        """
        folder = self.latest and str(self.latest.folder)
        text = str(error).replace(folder, self.name) if folder else str(error)
        return f"{text} (still serving {self.active.digest})" if self.active and self.active != self.latest else text

    @property
    def is_settled(self) -> bool:
        """True if the state is Ready or Failed."""
        return self.state in (AdapterState.READY, AdapterState.FAILED)
