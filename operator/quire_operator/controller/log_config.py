# SPDX-License-Identifier: Apache-2.0
"""Logging of the operator. Each line is a JSON object or text."""

import json
import logging
import sys
from datetime import UTC, datetime

_QUIET_LOGGERS = ("aiohttp.access", "kopf.objects", "kopf.activities")
"""Loggers that only log warnings and errors. Otherwise, they would log each request, or each event of each object."""


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object.

    The object contains the fields ts, level, logger and message. If the record has a traceback, the object also
    contains the field error.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
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
    """Send all logs to standard error. `log_format` is json or text."""
    handler = logging.StreamHandler(sys.stderr)
    text_formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text_formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    handler.addFilter(lambda record: not _is_failed_probe(record))
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def _is_failed_probe(record: logging.LogRecord) -> bool:
    """Whether the record is aiohttp's traceback of a failed liveness probe.

    kopf already logs the reason in one line.
    """
    return record.name == "aiohttp.server" and "ActivityError" in str(record.exc_info)
