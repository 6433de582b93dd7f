# SPDX-License-Identifier: Apache-2.0
"""The progress bar. It shows the number of finished lines, the number of failed lines, and the output tokens per
second."""

import sys
import time

from tqdm import tqdm

from quire_server.batch.reply import Reply
from quire_server.batch.result_store import ResultStore

_LOG_INTERVAL_S = 30.0
"""Seconds between updates if standard error is not a terminal, for example in a Job. Each update is then a new line."""


class Progress:
    """The progress bar of one run."""

    def __init__(self, num_lines: int, results: ResultStore) -> None:
        self._results = results
        self._num_tokens = 0
        self._started_at = time.monotonic()
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=max(num_lines, results.num_done),
            initial=results.num_done,
            unit="line",
            dynamic_ncols=True,
            mininterval=0.2 if is_terminal else _LOG_INTERVAL_S,
        )

    def advance(self, num_lines: int, reply: Reply | None = None) -> None:
        """Count lines that now have a result. `reply` is None if the lines are not requests."""
        if reply is not None:
            document = reply.json_body()
            usage = document.get("usage") if isinstance(document, dict) else None
            # Completions use the first name, and responses use the second name.
            names = ("completion_tokens", "output_tokens")
            num_tokens = next((usage[name] for name in names if name in usage), 0) if isinstance(usage, dict) else 0
            self._num_tokens += num_tokens if isinstance(num_tokens, int) else 0
        tokens_per_s = self._num_tokens / max(1e-3, time.monotonic() - self._started_at)
        self._bar.set_postfix_str(f"failed {self._results.num_failed}, {tokens_per_s:.0f} tokens/s", refresh=False)
        self._bar.update(num_lines)

    def close(self) -> None:
        """Draw the last state of the bar, and end its line."""
        self._bar.close()
