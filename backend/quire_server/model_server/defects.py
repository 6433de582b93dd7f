# SPDX-License-Identifier: Apache-2.0
"""Defects of Triton Inference Server that one request can use against all clients, and the releases that have them.

The preload library prevents them (preload/preload.c). launch.py tells the library which defects the installed release
has. SECURITY.md contains this table, and a test compares both.
"""

import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_RELEASE = (24, 10)
"""Release of the wheel on PyPI, which contains no file with its version."""


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect of the server."""

    name: str
    """Name in the environment variable QUIRE_SERVER_GUARD. As long as a release has any defect, all guards are on,
    because those for fixed defects do no harm. Only `status-header`, which changes the server's own memory, is for
    releases with this defect."""
    request: str
    effect: str
    guard: str
    """Answer to such a request if the guard is on."""
    fixed_in: tuple[int, int] | None
    """The first release without the defect, as year and month; None if no release is known."""


DEFECTS = (
    Defect(
        "json-depth",
        "HTTP: a JSON body with 200,000 nested arrays",
        "SIGSEGV",
        "400; at most 500 nested levels are accepted",
        (25, 7),
    ),
    Defect(
        "body-pieces",
        "HTTP: a body of 1,000,000 chunks",
        "SIGSEGV",
        "400; at most 65,536 pieces of a body are accepted",
        (25, 7),
    ),
    Defect(
        "compressed-body",
        "HTTP: a compressed body, for a model that is not Quire's",
        "SIGSEGV with 200,000 nested arrays; unlimited use of memory",
        "400; only the encoding `identity` is accepted",
        (25, 7),
    ),
    Defect(
        "status-header",
        "gRPC: a stream that is cancelled, with `triton_grpc_error: true`",
        "sometimes SIGSEGV in `StreamInferResponseComplete`",
        "the server ignores the header",
        (25, 7),
    ),
    Defect(
        "accept-encoding",
        "HTTP: `Accept-Encoding: gzip;q=1e400`",
        "SIGABRT",
        "400; weights are from 0 to 1, with at most 3 decimals",
        (26, 3),
    ),
    Defect(
        "header-length",
        "HTTP: `Inference-Header-Content-Length: 99999999999`",
        "SIGABRT in some releases",
        "400; at most 9 digits are accepted",
        (26, 9),
    ),
    Defect(
        "class-count",
        "gRPC: `class_count` for a text output",
        "SIGFPE",
        "the server returns an error",
        None,
    ),
    Defect(
        "shape-overflow",
        "HTTP, gRPC: an input of shape `[2305843009213693952]` (2^61) without data",
        "SIGABRT of a stub, which ends the server",
        "400; at most 2^28 elements are accepted",
        None,
    ),
    Defect(
        "body-size",
        "HTTP, gRPC: bodies of hundreds of megabytes",
        "other streams stop for seconds; memory that stays in use",
        "400, or the connection is closed; bodies, messages and the data of inputs have a limit, see below",
        None,
    ),
    Defect(
        "slow-request",
        "HTTP: a request that never becomes complete",
        "a connection that stays open forever",
        "the connection is closed after 60 s",
        None,
    ),
    Defect(
        "host",
        "HTTP: a web page whose name points to this machine (DNS rebinding)",
        "the page can use the models",
        "400, if the port listens on loopback and `Host` is another machine",
        None,
    ),
)


def defects_of(binary: Path) -> tuple[Defect, ...]:
    """Return the defects of the server with the program `binary`. A release that is not known has all of them."""
    release = release_of(binary)
    return tuple(
        defect for defect in DEFECTS if release is None or defect.fixed_in is None or release < defect.fixed_in
    )


def release_of(binary: Path) -> tuple[int, int] | None:
    """Return the release of a server as year and month; None if it is not known.

    NVIDIA's image contains a file with the server's version. The wheel has no such file.
    """
    try:
        version = (binary.parents[1] / "TRITON_VERSION").read_text()
    except OSError:
        return DEFAULT_RELEASE
    match = re.match(r"2\.(\d+)\.", version)
    if match is None or (minor := int(match[1])) < 51:
        return None
    # 2.51 is release 24.10. Each month has a version, but releases 25.06 and 25.07 share one; it counts as the older.
    num_months = minor - 51 + (minor >= 60)
    return 24 + (9 + num_months) // 12, (9 + num_months) % 12 + 1
