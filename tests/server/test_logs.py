# SPDX-License-Identifier: Apache-2.0
"""Which lines of the processes the log shows without --verbose."""

import io

import pytest

from quire_server.logs import LogRelay, is_noise


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


@pytest.mark.parametrize(
    ("is_terminal", "text"),
    [
        (True, "text  | a\n\x1b[Kcore  | 10%\r\x1b[Kcore  | 20%\r\x1b[Ktext  | b\ntext  | c\n"),
        (False, "text  | a\ntext  | b\ntext  | c\n"),
    ],
)
def test_bars_are_shown_on_a_terminal_until_the_next_line(is_terminal, text, monkeypatch):
    output = io.StringIO()
    output.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stderr", output)
    relay = LogRelay(verbose=False)
    for name, line in (("text", "a"), ("core", "\r10%"), ("core", "\r20%"), ("text", "b"), ("text", "c")):
        relay(name, line)
    assert output.getvalue() == text
