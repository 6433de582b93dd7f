# SPDX-License-Identifier: Apache-2.0
"""Records for how long the API server has not responded to a watch. Watchers update this record. The liveness probe and
the metrics use it."""

import time

from quire_operator.kube.resources import Resource


class WatchHeartbeat:
    """Records when one watch last received data, and when it last received any response. A watch is for one kind, in
    one namespace or in all namespaces."""

    def __init__(self, resource: Resource, namespace: str | None = None) -> None:
        """`namespace` is None for all namespaces."""
        self.resource, self.namespace = resource, namespace
        self.ever_beat = False
        """Whether the API server has sent data or accepted the watch at least once since this object was created."""
        self.denied = ""
        """The answer of the API server, if it denies the watch because of a missing permission. Empty if it allows the
        watch."""
        self._last_beat_at = self._last_response_at = time.monotonic()

    def beat(self) -> None:
        """Record that the API server sent objects or a bookmark, or accepted a watch."""
        self._last_beat_at = self._last_response_at = time.monotonic()
        self.ever_beat, self.denied = True, ""

    def record_error(self, denied: str = "") -> None:
        """Record that the API server responded with an error. The watcher then tries again. A restart of the operator
        would not help. `denied` is the error if a permission is missing."""
        self._last_response_at = time.monotonic()
        self.denied = denied or self.denied

    def reset(self) -> None:
        """Set both ages to 0. The operator calls this method if no watch was possible until now."""
        self._last_beat_at = self._last_response_at = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the last call of `beat`."""
        return time.monotonic() - self._last_beat_at

    @property
    def silent_s(self) -> float:
        """Seconds since the last response. An error is also a response, but a dead connection does not respond."""
        return time.monotonic() - self._last_response_at
