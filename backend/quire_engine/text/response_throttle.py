# SPDX-License-Identifier: Apache-2.0
"""Pace: how many responses a second clients get, so that answering them does not cost the steps that make the tokens.

Every response is work for stub, server and client (0.2 ms of CPU, together), and where the engine computes on the
same cores it is taken from the next token. So responses that can wait do, and go out together: one with several
tokens costs little more than one with a single token. Pure: the caller brings the time and does the waiting.
"""

RESPONSES_PER_S_PER_CORE = 250.0
"""Where the engine computes on the CPU: 5 % of each core. A stream alone gets each token at once (up to 250 a second
and core); 64 streams on two cores get theirs every 128 ms, faster than anyone reads."""


class ResponseThrottle:
    """When waiting responses may go out: after some did, not before as many could have gone one by one."""

    def __init__(self, responses_per_s: float | None) -> None:
        """`responses_per_s` None: at once, always; for an engine on a device of its own."""
        self._interval_s = 1.0 / responses_per_s if responses_per_s else 0.0
        self._next_send_at = 0.0

    def delay_s(self, now: float) -> float:
        """Seconds from `now` until responses that can wait may go out; 0 when they may now."""
        return max(0.0, self._next_send_at - now)

    def record_sent(self, num_responses: int, now: float) -> None:
        """So many went out just now, those included that could not wait."""
        self._next_send_at = max(self._next_send_at, now) + num_responses * self._interval_s
