# SPDX-License-Identifier: Apache-2.0
"""The error for a connection to another machine whose other end is wrong. Used by the wire formats between machines."""

from quire_spec.errors import QuireError


class ProtocolError(QuireError):
    """The other end broke the protocol, or does not have the key. The connection must be closed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """Label for counters."""
