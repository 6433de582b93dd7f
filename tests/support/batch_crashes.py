# SPDX-License-Identifier: Apache-2.0
"""Runs batches that end at a given write, fsync or truncation, as a program: `python batch_crashes.py MODE FOLDER`.

Each run is a forked process, so that hundreds of them take seconds. Requests are answered by the endpoint below; files,
runner and recovery are the real ones.
"""

import asyncio
import itertools
import json
import os
import resource
import sys
from pathlib import Path

from quire_server.batch import input_file, result_file, runner
from quire_server.batch.input_file import InputFile
from quire_server.batch.reply import Reply
from quire_server.batch.result_store import ResultStore
from quire_server.batch.runner import BatchRunner, RunnerSettings

NUM_LINES = 12
KILLED = 9
STORAGE_FAILED = 7


class Echo:
    """Answers each request with its prompt; every fifth gets 400."""

    async def post(self, url, body):
        await asyncio.sleep(0)
        status = 400 if int(body["prompt"]) % 5 == 0 else 200
        return Reply(status, json.dumps({"text": body["prompt"] * body["length"]}).encode())


class NoProgress:
    """Draws nothing."""

    def advance(self, num_lines, reply=None):
        """Count lines."""


class CrashPoint:
    """Ends the process at the n-th call that changes a file, before it, within it or after it."""

    def __init__(self, number):
        self.number, self.when = divmod(number, 3)
        self.calls = itertools.count()
        self.real = {name: getattr(os, name) for name in ("write", "fsync", "ftruncate")}

    def install(self):
        """Replace the calls, for this process only."""
        for name in self.real:
            setattr(os, name, lambda *args, name=name: self.call(name, *args))

    def call(self, name, *args):
        is_here = next(self.calls) == self.number
        if is_here and self.when == 0:
            os._exit(KILLED)
        if is_here and self.when == 1 and name == "write":
            self.real["write"](args[0], args[1][: len(args[1]) // 2])
            os._exit(KILLED)
        result = self.real[name](*args)
        if is_here:
            os._exit(KILLED)
        return result


def write_input(folder: Path, length: int = 3) -> None:
    """Write requests, a line that is no JSON, and a line whose custom_id exists."""
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "b" if i % 2 else "a", "prompt": f"{i:03}", "length": length},
        }
        for i in range(NUM_LINES)
    ]
    text = "\n".join([*map(json.dumps, lines), "{no json", json.dumps(lines[0])])
    (folder / "in.jsonl").write_text(text)


def run_once(folder: Path) -> None:
    """Run the batch in this process."""
    with (
        ResultStore(folder / "out.jsonl", folder / "err.jsonl", folder / "in.jsonl") as results,
        InputFile(folder / "in.jsonl", results.is_done) as requests,
    ):
        asyncio.run(BatchRunner(Echo(), requests, results, NoProgress(), RunnerSettings(3)).run())


def run_forked(folder: Path, crash_point: CrashPoint | None) -> int:
    """Run the batch in a forked process; return how it ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if crash_point is not None:
                crash_point.install()
            run_once(folder)
            code = 0
        except result_file.StorageFailed:
            code = STORAGE_FAILED
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check_whole(folder: Path) -> None:
    """Check that all complete lines of both files are records, each of another line of the input."""
    ids = []
    for name in ("out.jsonl", "err.jsonl"):
        data = (folder / name).read_bytes() if (folder / name).exists() else b""
        records = map(json.loads, data.splitlines()[: data.count(b"\n")])
        ids += [record["id"] if "line" in record["id"] else record["custom_id"] for record in records]
    assert len(ids) == len(set(ids)), f"repeated: {ids}"


def check_complete(folder: Path, length: int = 3) -> None:
    """Check that each line of the input has exactly one record with its own content."""
    check_whole(folder)
    results = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    errors = [json.loads(line) for line in (folder / "err.jsonl").read_text().splitlines()]
    answered = results + [error for error in errors if error["response"] is not None]
    assert {r["custom_id"] for r in answered} == {f"r{i}" for i in range(NUM_LINES)}
    for record in answered:
        number = int(record["custom_id"][1:])
        assert record["response"]["body"]["text"] == f"{number:03}" * length
        assert (record in errors) is (number % 5 == 0)
    codes = [error["error"]["code"] for error in errors if error["response"] is None]
    assert sorted(codes) == ["duplicate_custom_id", "invalid_json_line"], codes


def crash_everywhere(folder: Path) -> int:
    """End runs at every point, some of them twice; return how many points exist."""
    for number in itertools.count():
        case = folder / str(number)
        case.mkdir()
        write_input(case)
        code = run_forked(case, CrashPoint(number))
        if code == 0:
            check_complete(case)
            return number
        assert code == KILLED, code
        check_whole(case)
        # The next run also ends early, at each point in turn, possibly within its recovery.
        assert run_forked(case, CrashPoint(number % 10)) in (KILLED, 0)
        check_whole(case)
        assert run_forked(case, None) == 0
        check_complete(case)
    raise AssertionError("unreachable")


def fill_disk(folder: Path) -> int:
    """Run on a full disk, with less free space in each case; return how many runs found it full."""
    num_full = 0
    for free_pages in range(1, 8):
        case = folder / str(free_pages)
        case.mkdir()
        write_input(case, length=700)
        filler = case / "filler"
        space = os.statvfs(folder)
        with filler.open("wb") as file:
            file.write(bytes(max(0, (space.f_bavail - free_pages) * space.f_frsize)))
        code = run_forked(case, None)
        check_whole(case)
        if code == STORAGE_FAILED:
            num_full += 1
            assert run_forked(case, None) == STORAGE_FAILED
            check_whole(case)
        for name in ("out.jsonl", "err.jsonl"):
            assert (case / name).read_bytes()[-1:] in (b"", b"\n"), f"{name} ends with a part of a record"
        filler.unlink()
        assert run_forked(case, None) == 0
        check_complete(case, length=700)
        for file in case.iterdir():
            file.unlink()
    return num_full


if __name__ == "__main__":
    input_file.WINDOW_LINES = 4
    runner.SYNC_INTERVAL_S = 1e-4
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    mode, target = sys.argv[1], Path(sys.argv[2])
    print({"crash": crash_everywhere, "full": fill_disk}[mode](target))
