# SPDX-License-Identifier: Apache-2.0
"""The operator's log: a JSON object a line for machines, or text for people."""

import json
import logging
import sys
from datetime import UTC, datetime

_QUIET_LOGGERS = ("aiohttp.access", "httpx", "kopf.objects", "kopf.activities")
"""A line for every event of every object says nothing."""


class JsonFormatter(logging.Formatter):
    """One object: ts, level, logger, message, and error with its trace where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def configure(log_format: str, level: str) -> None:
    """Send all logs to standard error; `form` is json or text."""
    handler = logging.StreamHandler(sys.stderr)
    text_formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text_formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    handler.addFilter(lambda record: not _is_failed_probe(record))
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def _is_failed_probe(record: logging.LogRecord) -> bool:
    """Whether aiohttp logs the trace of a failed liveness probe. kopf has logged its reason in one line."""
    return record.name == "aiohttp.server" and "ActivityError" in str(record.exc_info)
