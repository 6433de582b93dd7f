# SPDX-License-Identifier: Apache-2.0
"""Descriptions of library errors."""

import pytest

from quire_spec.net.redaction import describe_error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "ValueError"),
        ("\n  \n", "ValueError"),
        ("one\ntwo", "one"),
        ("400, url='https://user:s3cr3t@h:8/a?signature=s3cr3t&b'", "400, url='https://h:8/a"),
        ("HTTP://s3cr3t@h#s3cr3t to http://b/c@d, and on", "HTTP://h to http://b/c@d, and on"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_describe_error_is_one_line_without_users_and_queries(text, words):
    assert describe_error(ValueError(text)) == words
