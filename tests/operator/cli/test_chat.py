# SPDX-License-Identifier: Apache-2.0
"""`quire chat` without a server: what a terminal gets, and which URLs are servers."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_operator.cli.chat.api import Piece
from quire_operator.cli.chat.conversation import Conversation
from quire_operator.cli.chat.terminal import AnswerPrinter
from quire_spec.errors import ConfigError
from quire_spec.net.server_url import server_root

PIECES = st.lists(st.builds(Piece, st.text(), st.text()))
OURS = re.compile(r"\x1b\[[02]m")


def printed(pieces, is_terminal, has_colors=False):
    output = io.StringIO()
    printer = AnswerPrinter(output, is_terminal, has_colors)
    printer.print(piece for piece in pieces)
    return printer.text, output.getvalue()


@given(PIECES)
def test_a_pipe_gets_the_answer_and_nothing_else(pieces):
    answer = "".join(piece.text for piece in pieces)
    text, output = printed(pieces, is_terminal=False)
    assert text == answer
    assert output == answer + ("" if not answer or answer.endswith("\n") else "\n")


@given(PIECES)
def test_no_output_controls_the_terminal(pieces):
    text, output = printed(pieces, is_terminal=True, has_colors=True)
    assert text == "".join(piece.text for piece in pieces), "the conversation keeps what the model said"
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", OURS.sub("", output))
    marks = OURS.findall(output)
    assert marks == ["\x1b[2m", "\x1b[0m"] * (len(marks) // 2), "the terminal stays dimmed"


def test_thinking_is_dimmed_or_named():
    pieces = [Piece(reasoning="so"), Piece(reasoning=" it is"), Piece("four", finish_reason="stop")]
    assert printed(pieces, True, True)[1] == "\x1b[2mso it is\x1b[0m\n\nfour\n"
    assert printed(pieces, True, False)[1] == "thinking: so it is\n\nfour\n"
    assert printed(pieces, False)[1] == "four\n"


def test_a_stopped_answer_without_text_leaves_no_turn():
    conversation = Conversation("tales", system="Be brief", parameters={"temperature": 0})
    conversation.add_turn("Hello", "")
    conversation.add_turn("Hello", "Hi")
    assert conversation.request("And?") == {
        "model": "tales",
        "temperature": 0,
        "messages": [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "And?"},
        ],
    }


@pytest.mark.parametrize("url", ["http://a:8004", "http://a:8004/", "http://a:8004/v1", "http://a:8004/v1/"])
def test_the_root_of_a_url_has_no_version(url):
    assert server_root(url, "URL", "KEY") == "http://a:8004"


@given(st.text().map("http://{}".format) | st.text())
def test_every_text_is_a_url_or_one_error(text):
    try:
        assert server_root(text, "URL", "KEY").startswith(("http://", "https://"))
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
