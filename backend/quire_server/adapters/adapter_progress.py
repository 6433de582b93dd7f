# SPDX-License-Identifier: Apache-2.0
"""Progress of one adapter of a pod: its desired and actual state, and the transitions between states. Pure.

The adapter manager does the work, and reports each outcome as an event. `transition` returns the progress after the
event. Its docstring and docs/vocabulary.md list the words for the states; other modules use the same words.
"""

from dataclasses import dataclass, replace

from quire_server.adapters.fetcher import CachedAdapter
from quire_spec.documents.adapter_catalog import AdapterSpec
from quire_spec.documents.pod_status import AdapterState
from quire_spec.documents.sources import Source
from quire_spec.errors import AccessDenied, InvalidArgument, QuireError
from quire_spec.protocol.results import AdapterCheck


@dataclass(frozen=True, slots=True)
class Failure:
    """The last failed attempt."""

    error: QuireError
    count: int
    """Number of failures since the adapter was last ready. It determines the time of the next attempt."""
    is_permanent: bool
    """True if the adapter is invalid. In this case, there is no attempt until the catalog changes."""
    denied_secret_version: int | None
    """If the source rejected the credentials: version of the Secret at that time. A new version is tried at once."""


@dataclass(frozen=True, slots=True)
class AdapterProgress:
    """Desired and actual state of one adapter."""

    desired: AdapterSpec | None
    """The adapter's entry in the catalog. None while the adapter is being removed."""
    exposed: bool
    """Whether the server has, or will have, a model with the adapter's name."""
    revision: int = 0
    """Number that increases with each new catalog. After an increase, the source must be checked again."""
    checked_revision: int = -1
    """The value of `revision` when the source was last checked."""
    latest: CachedAdapter | None = None
    """The content of the catalog's source when it was last fetched."""
    latest_source: Source | None = None
    """The source of `latest`. None: the source must be read, even if it is the same."""
    active: CachedAdapter | None = None
    """The content that is used for requests with this name. While a replacement is loading, and after a replacement has
    failed, this is the previous content."""
    secret_version: int = 0
    """Version of the source's Secret when the source was last read."""
    state: AdapterState = AdapterState.FETCHING
    failure: Failure | None = None
    check: AdapterCheck | None = None
    """Result of the checks of `latest`; None until they have passed."""
    held: bool = False
    """Whether requests do not use the adapter: it is a candidate, or the previous content of another adapter."""

    @property
    def is_checked(self) -> bool:
        """Whether the source was read, or found to be the same, since the catalog last changed."""
        return self.checked_revision == self.revision

    @property
    def is_settled(self) -> bool:
        """Whether the state is Verified, Ready or Failed."""
        return self.state in (AdapterState.VERIFIED, AdapterState.READY, AdapterState.FAILED)

    @property
    def must_fetch(self) -> bool:
        """Whether the desired source is another one than that of `latest`."""
        return self.desired is not None and self.desired.source != self.latest_source

    @property
    def is_rejected(self) -> bool:
        """Whether the adapter is invalid, so that only a new catalog can lead to another attempt."""
        return self.failure is not None and self.failure.is_permanent


@dataclass(frozen=True, slots=True)
class CatalogChanged:
    """The catalog changed. `desired` is None if it does not contain the adapter any more."""

    desired: AdapterSpec | None
    exposed: bool
    must_read: bool = False
    """Whether the source must be read even if it is the same."""


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """The manager begins to change the actual state to the desired state."""


@dataclass(frozen=True, slots=True)
class FetchStarted:
    """The source is being read."""

    secret_version: int
    """Version of the source's Secret; 0 if it has none."""


@dataclass(frozen=True, slots=True)
class SourceRead:
    """The source of a revision was fetched."""

    revision: int
    source: Source
    content: CachedAdapter


@dataclass(frozen=True, slots=True)
class SourceUnreachable:
    """The source could not be checked, but it is that of `latest`, which stays in use."""

    revision: int


@dataclass(frozen=True, slots=True)
class LoadStarted:
    """The processes begin to load an adapter, or one of them ended and must load it again."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The latest content has passed its checks."""

    check: AdapterCheck


@dataclass(frozen=True, slots=True)
class Activated:
    """From now on, requests with the adapter's name use this content."""

    content: CachedAdapter


@dataclass(frozen=True, slots=True)
class Converged:
    """The actual state is the desired one."""


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt failed."""

    error: QuireError


@dataclass(frozen=True, slots=True)
class Removed:
    """The name and the model do not exist any more."""


Event = (
    CatalogChanged
    | AttemptStarted
    | FetchStarted
    | SourceRead
    | SourceUnreachable
    | LoadStarted
    | Checked
    | Activated
    | Converged
    | AttemptFailed
    | Removed
)


def transition(progress: AdapterProgress, event: Event) -> AdapterProgress:
    """Return the progress of an adapter after an event.

    - Fetching: the source is being downloaded to the cache.
    - Loading: the core loads and checks the adapter, the text process gets its name, and the server loads its model.
    - Verified: the adapter is loaded and checked, and held: requests do not use it.
    - Ready: the adapter serves requests.
    - Failed: the last attempt failed.
    """
    match event:
        case CatalogChanged(desired, exposed, must_read):
            is_new = desired is not None and (
                must_read or progress.desired is None or desired.source != progress.desired.source
            )
            return replace(
                progress,
                desired=desired,
                exposed=exposed,
                revision=progress.revision + 1,
                latest_source=None if must_read else progress.latest_source,
                # The state changes at once. Otherwise, the client that sent the catalog could still read the previous
                # state Ready.
                state=AdapterState.FETCHING if is_new else progress.state,
                failure=progress.failure and replace(progress.failure, is_permanent=False),
            )
        case AttemptStarted():
            failure = progress.failure and replace(progress.failure, denied_secret_version=None)
            must_fetch = not progress.is_rejected and not progress.is_checked and progress.must_fetch
            state = AdapterState.FETCHING if must_fetch else progress.state
            return replace(progress, failure=failure, state=state)
        case FetchStarted(secret_version):
            return replace(progress, secret_version=secret_version)
        case SourceRead(revision, source, content):
            check = progress.check if content == progress.latest else None
            return replace(progress, latest=content, latest_source=source, checked_revision=revision, check=check)
        case SourceUnreachable(revision):
            return replace(progress, checked_revision=revision)
        case LoadStarted():
            return replace(progress, state=AdapterState.LOADING)
        case Checked(check):
            return replace(progress, check=check)
        case Activated(content):
            return replace(progress, active=content)
        case Converged():
            return replace(progress, state=AdapterState.VERIFIED if progress.held else AdapterState.READY, failure=None)
        case AttemptFailed(error):
            is_permanent = isinstance(error, InvalidArgument)
            count = (progress.failure.count if progress.failure else 0) + (not is_permanent)
            denied = progress.secret_version if isinstance(error, AccessDenied) else None
            return replace(progress, state=AdapterState.FAILED, failure=Failure(error, count, is_permanent, denied))
        case Removed():
            return replace(progress, latest=None, latest_source=None, active=None, check=None, checked_revision=-1)
