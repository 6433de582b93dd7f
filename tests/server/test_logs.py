# SPDX-License-Identifier: Apache-2.0
"""Which lines of the processes the log shows without --verbose."""

import pytest

from quire_server.logs import is_noise


@pytest.mark.parametrize(
    ("name", "line", "hidden"),
    [
        ("server", 'I1121 03:04:40.773568 8875 model_lifecycle.cc:472] "loading: base:1"', True),
        ("server", "| base  | 1       | READY  |", True),
        ("server", "+-----+", True),
        ("server", "", True),
        ("server", 'E1121 03:04:40.772334 8875 server.cc:241] "CudaDriverHelper has not been initialized."', True),
        (
            "server",
            'E1122 3:04:40.9 8875 infer_handler.h:840] "[INTERNAL] HandleCancellation called even when the context was '
            'not cancelled for ModelStreamInferHandler, rpc_ok=1, context 0, 0 step COMPLETE"',
            True,
        ),
        ("server", "E1121 03:04:40.9 8875 model_lifecycle.cc:9] \"failed to load 'x'\"", False),
        ("server", 'W1121 03:04:40.9 8875 x.cc:9] "odd"', False),
        ("server", "Traceback (most recent call last):", False),
        ("core", "2026-11-21 03:30:32,003 INFO quire.core engine core listens", False),
        ("core", "| looks like a table", False),
    ],
)
def test_hides_only_harmless_server_lines(name, line, hidden):
    assert is_noise(name, line) is hidden
