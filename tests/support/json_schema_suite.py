# SPDX-License-Identifier: Apache-2.0
"""JSON-Schema-Test-Suite, draft 2020-12, from the source distribution of jsonschema, and spellings of JSON values."""

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

VERSION = "4.25.1"
CACHE = Path.home() / ".cache/quire/json-schema-suite"
_FOLDER = f"jsonschema-{VERSION}/json/tests/draft2020-12"
_EXCLUDED = ("format.json", "vocabulary.json")
"""Tests of keywords that are annotations by default."""


def groups() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the groups, each with a schema and tests, and their names. Downloads the suite the first time.

    Raises:
        OSError: the package index is not reachable.
    """
    archive = CACHE / f"jsonschema-{VERSION}.tar.gz"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
        done = subprocess.run(
            [*command, "--dest", str(CACHE), f"jsonschema=={VERSION}"], capture_output=True, text=True, timeout=150
        )
        if done.returncode:
            raise OSError(f"pip cannot download jsonschema {VERSION}: {done.stderr[-300:]}")
    with tarfile.open(archive) as files:
        for name in sorted(files.getnames()):
            folder, _, file_name = name.rpartition("/")
            if folder == _FOLDER and file_name.endswith(".json") and file_name not in _EXCLUDED:
                file = files.extractfile(name)
                assert file is not None
                for group in json.load(file):
                    yield f"{file_name}: {group['description']}", group


def spellings(value: Any) -> Iterator[str]:
    """Yield texts of a value: keys in several orders, numbers with and without fraction, strings with escapes."""
    if isinstance(value, dict):
        for keys in islice(permutations(value), 120):
            members = [
                [f"{json.dumps(key, ensure_ascii=False)}:{text}" for text in spellings(value[key])] for key in keys
            ]
            yield from ("{" + ",".join(texts) + "}" for texts in islice(product(*members), 50))
    elif isinstance(value, list):
        yield from ("[" + ",".join(texts) + "]" for texts in islice(product(*map(list, map(spellings, value))), 200))
    elif isinstance(value, str):
        yield from dict.fromkeys([json.dumps(value, ensure_ascii=False), json.dumps(value)])
    elif isinstance(value, bool) or value is None:
        yield json.dumps(value)
    else:
        forms = [json.dumps(value), format(Decimal(str(value)), "f")]
        forms += [str(int(value))] if isinstance(value, float) and value.is_integer() else []
        forms += [f"{value}.0"] if isinstance(value, int) else []
        yield from dict.fromkeys(forms)
