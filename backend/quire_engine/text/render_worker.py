# SPDX-License-Identifier: Apache-2.0
"""Process that renders chat templates: `python -m quire_engine.text.render_worker`, started by chat_renderer.py.

A template can take any amount of time and memory, depending on the messages of a client. Therefore, this process has a
memory limit, and the text process kills it when rendering takes too long. The process reads lines, each of which
contains a JSON object. The first line contains the templates and the added tokens of the checkpoint, and each further
line contains a conversation. The process answers each line with one line.
"""

import json
import resource
import signal
import sys
from typing import Any

from quire_engine.ipc.process import set_parent_death_signal
from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_engine.tokenization.conversation_renderer import ConversationRenderer
from quire_spec.errors import Code, InvalidArgument, QuireError, error_text

MAX_MEMORY_BYTES = 1 * 2**30


class RenderWorker:
    """Answers the conversations of one checkpoint."""

    def __init__(
        self, files: dict[str, Any], special_tokens: list[str], other_tokens: list[str], max_chars: int
    ) -> None:
        self._renderer = ConversationRenderer(ChatTemplateFiles(**files), special_tokens, other_tokens)
        self._max_chars = max_chars

    def answer(self, chat: dict[str, Any]) -> dict[str, Any]:
        """Render a conversation. Return its text, in which control tokens are marked, or an error."""
        try:
            text = self._renderer.render(chat, chat.get("template_file"))
            if len(text) > self._max_chars:
                raise InvalidArgument(
                    f"messages: the conversation has {len(text)} characters, but a prompt can have at most "
                    f"{self._max_chars}; shorten the conversation"
                )
        except QuireError as error:
            return {"error_code": error.code, "error": error_text(error)}
        except (MemoryError, RecursionError):
            return {"error_code": Code.INVALID_ARG, "error": "messages: the chat template needs too much memory"}
        except Exception as error:
            return {"error_code": Code.INTERNAL, "error": f"chat template: {type(error).__name__}"}
        return {"text": text}


def main() -> None:
    """Answer each line of the standard input, until the input ends."""
    set_parent_death_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    worker = RenderWorker(**json.loads(sys.stdin.readline()))
    # The template is compiled now, so that the first conversation does not wait for it.
    worker.answer(
        {"messages": [{"role": "user", "content": ""}], "template_kwargs": {}}
        | {"add_generation_prompt": True, "continue_final_message": False}
    )
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
