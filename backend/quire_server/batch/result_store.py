# SPDX-License-Identifier: Apache-2.0
"""Stores the results of a batch.

There is a file of responses and a file of errors. Each line of the input gets exactly one record in one of these files.
The records have the format of OpenAI's Batch API. The ids of the lines that have a record are also kept in memory.
"""

import json
import uuid
from pathlib import Path
from typing import Any, Self

from quire_server.batch.id_set import IdSet
from quire_server.batch.reply import Reply
from quire_server.batch.request_line import BadLine
from quire_server.batch.result_file import ResultFile
from quire_spec.errors import ConfigError

_REQUEST_PREFIX = "batch_req_"


class ResultStore:
    """The open output file and error file."""

    def __init__(self, output: Path, error_file: Path, input_file: Path) -> None:
        """Open the files, and read the records of earlier runs.

        Raises:
            ConfigError: a file cannot be used.
        """
        self.num_done = 0
        """Number of lines with a record, including records of earlier runs."""
        self.num_failed = 0
        """Number of lines with a record in the error file."""
        self._done_ids = IdSet()
        self._output = ResultFile(output)
        try:
            if self._output.same_file(input_file) or self._output.same_file(error_file):
                raise ConfigError(f"--output {output}: is also the input or the error file; give another file")
            self._errors = ResultFile(error_file)
        except BaseException:
            self._output.close()
            raise
        try:
            if self._errors.same_file(input_file):
                raise ConfigError(f"--error-file {error_file}: is also the input; give another file")
            self._recover()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_done(self, line_id: str) -> bool:
        """Return whether the line with this id has a record. The id of a request is its custom_id."""
        return line_id in self._done_ids

    def add_reply(self, custom_id: str, reply: Reply) -> None:
        """Append the reply to a request; raises StorageFailed."""
        body, error = reply.json_body(), None
        if body is None:
            error = {"code": "no_response" if reply.status == 0 else "invalid_response", "message": reply.describe()}
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": body} if reply.status else None
        record = {
            "id": _REQUEST_PREFIX + uuid.uuid4().hex,
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        self._append(record, custom_id, reply.status == 200 and body is not None)

    def add_bad_line(self, line: BadLine) -> None:
        """Append the error of a line that is not a request; raises StorageFailed."""
        error = {"code": line.code, "message": line.message}
        record = {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}
        self._append(record, line.id, False)

    def sync(self) -> None:
        """Wait until all records are on the disk. This call blocks. Raises StorageFailed."""
        self._output.sync()
        self._errors.sync()

    def close(self) -> None:
        """Close the files."""
        self._output.close()
        self._errors.close()

    def _append(self, record: dict[str, Any], line_id: str, succeeded: bool) -> None:
        (self._output if succeeded else self._errors).append(_encode(record))
        self._done_ids.add(line_id)
        self.num_done += 1
        self.num_failed += not succeeded

    def _recover(self) -> None:
        for file in (self._output, self._errors):
            for record in file.recover():
                is_request = str(record["id"]).startswith(_REQUEST_PREFIX)
                line_id = str(record.get("custom_id") if is_request else record["id"])
                if not self._done_ids.add(line_id):
                    raise ConfigError(
                        f"{file.path}: contains a duplicate record of {line_id[:100]!r}; give other files"
                    )
                self.num_done += 1
                self.num_failed += file is self._errors


def _encode(record: dict[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # the record contains half of a surrogate pair
        return json.dumps(record).encode() + b"\n"
