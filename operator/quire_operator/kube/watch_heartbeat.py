# SPDX-License-Identifier: Apache-2.0
"""Time since the last sign of life of a watch. Watchers update it; the liveness probe and the metrics read it."""

import time

from quire_operator.kube.resources import Resource


class WatchHeartbeat:
    """Age of what is known of one kind, in one namespace or in all."""

    def __init__(self, resource: Resource, namespace: str | None = None) -> None:
        """`namespace` None: all."""
        self.resource, self.namespace = resource, namespace
        self.ever_beat = False
        """Whether the API server has sent anything since the start."""
        self._last_beat_at = self._last_response_at = time.monotonic()

    def beat(self) -> None:
        """Record that the API server sent objects or a bookmark, or accepted a watch."""
        self._last_beat_at = self._last_response_at = time.monotonic()
        self.ever_beat = True

    def record_error(self) -> None:
        """Record that the API server answered with an error: the watch is tried again, and a restart would not help."""
        self._last_response_at = time.monotonic()

    def reset(self) -> None:
        """Count both ages from now, because no watch was possible so far."""
        self._last_beat_at = self._last_response_at = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._last_beat_at

    @property
    def silent_s(self) -> float:
        """Seconds since the last response, an error included. A dead connection has none."""
        return time.monotonic() - self._last_response_at
