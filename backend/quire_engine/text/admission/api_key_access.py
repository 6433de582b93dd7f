# SPDX-License-Identifier: Apache-2.0
"""What each API key may use: its adapters, and its requests and tokens per minute.

Policy only: the caller passes the time. A request beyond a limit is rejected and never queued, as with the limits of
adapters (rate_limiter.py). Without rules, every key may use everything.
"""

from collections.abc import Iterable

from quire_engine.text.admission.token_bucket import TokenBucket
from quire_spec.documents.api_key_rule import ApiKeyRule
from quire_spec.errors import Unavailable

_MINUTE_S = 60.0


class ApiKeyAccess:
    """The rules and the token buckets, by the name of the key."""

    def __init__(self, rules: Iterable[ApiKeyRule] = ()) -> None:
        self._rules = {rule.name: rule for rule in rules}
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        """By the name of the key and the field of the limit. The first request creates a full bucket."""

    def allows(self, api_key_name: str, adapter_name: str) -> bool:
        """Return whether a key may use an adapter. Requests without a key come from this pod, and may use all. If there
        are rules, a key without a rule may use none."""
        if not self._rules or not api_key_name:
            return True
        rule = self._rules.get(api_key_name)
        return rule is not None and rule.allows(adapter_name)

    def admit(self, api_key_name: str, now: float) -> None:
        """Count a new request.

        Raises:
            Unavailable: the key is at a limit; the message contains the limit and when to retry.
        """
        if (rule := self._rules.get(api_key_name)) is None:
            return
        limits = {"requestsPerMinute": rule.requestsPerMinute, "tokensPerMinute": rule.tokensPerMinute}
        for field, limit in limits.items():
            if limit is None:
                continue
            rate = limit / _MINUTE_S
            bucket = self._buckets.setdefault((api_key_name, field), TokenBucket(limit, now))
            bucket.refill(rate, limit, now)
            if (retry_after_s := bucket.wait_s(rate)) > 0:
                raise Unavailable(
                    f"API key {api_key_name!r}: rate limit reached, {field} is {limit}; retry in {retry_after_s:.1f} "
                    "s, or ask for a higher limit",
                    retry_after_s=retry_after_s,
                )
        if rule.requestsPerMinute is not None:
            self._buckets[api_key_name, "requestsPerMinute"].available -= 1

    def consume(self, api_key_name: str, num_tokens: int) -> None:
        """Count the tokens of a prompt, or generated tokens."""
        if (bucket := self._buckets.get((api_key_name, "tokensPerMinute"))) is not None:
            bucket.available -= num_tokens
