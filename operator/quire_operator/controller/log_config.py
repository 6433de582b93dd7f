# SPDX-License-Identifier: Apache-2.0
"""The operator's log: a JSON object a line for machines, or text for people."""

import json
import logging
import sys
from datetime import UTC, datetime

_QUIET_LOGGERS = ("aiohttp.access", "httpx", "kopf.objects", "kopf.activities")
"""A line for every event of every object says nothing."""

_KOPF_SIGNALS_MESSAGE = "OS signals are ignored"
"""What kopf says at each start: that it takes no signals, which is what we want of it."""


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
    handler.addFilter(lambda record: not str(record.msg).startswith(_KOPF_SIGNALS_MESSAGE))
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
