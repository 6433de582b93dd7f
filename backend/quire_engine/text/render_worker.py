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
from collections import OrderedDict
from pathlib import Path
from typing import Any

from quire_engine.ipc.process import set_parent_death_signal
from quire_engine.tokenization.chat_template import ChatTemplate
from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_engine.tokenization.control_tokens import ControlTokens
from quire_spec.errors import Code, ConfigError, InvalidArgument, QuireError, Unavailable

MAX_MEMORY_BYTES = 1 * 2**30
MAX_ADAPTER_TEMPLATES = 64
"""Maximum number of adapters whose compiled templates are kept."""


class RenderWorker:
    """The templates of one checkpoint."""

    def __init__(
        self, files: dict[str, Any], special_tokens: list[str], other_tokens: list[str], max_chars: int
    ) -> None:
        self._files = ChatTemplateFiles(**files)
        self._max_chars = max_chars
        self._special_tokens, self._other_tokens = special_tokens, other_tokens
        self._adapter_files: OrderedDict[str, _Templates] = OrderedDict()
        self._base_templates = self._compile(self._files)

    def answer(self, chat: dict[str, Any]) -> dict[str, Any]:
        """Render a conversation. Return its text, in which control tokens are marked, or an error."""
        try:
            text = self._render(chat)
        except QuireError as error:
            return {"error_code": error.code, "error": str(error)}
        except (MemoryError, RecursionError):
            return {"error_code": Code.INVALID_ARG, "error": "messages: the chat template needs too much memory"}
        except Exception as error:
            return {"error_code": Code.INTERNAL, "error": f"chat template: {type(error).__name__}"}
        return {"text": text}

    def _render(self, chat: dict[str, Any]) -> str:
        tools, template_file = chat.get("tools"), chat.get("template_file")
        templates = self._base_templates if template_file is None else self._adapter_templates(template_file)
        control_tokens = templates.control_tokens
        text = templates.get(bool(tools)).render(
            control_tokens.mark_messages(chat["messages"]),
            chat["add_generation_prompt"],
            chat["continue_final_message"],
            control_tokens.mark(tools),
            control_tokens.mark(chat.get("documents")),
            **control_tokens.mark(chat["template_kwargs"]),
        )
        if len(text) > self._max_chars:
            raise InvalidArgument(
                f"messages: the conversation has {len(text)} characters, but a prompt can have at most "
                f"{self._max_chars}; shorten the conversation"
            )
        return text

    def _adapter_templates(self, file: str) -> "_Templates":
        """Return the templates of an adapter. The file of an adapter never changes, because the name of its folder is
        the adapter's digest."""
        if file not in self._adapter_files:
            try:
                files = self._files.replaced_by(Path(file))
            except ConfigError as error:
                raise Unavailable("messages: the chat template of the adapter cannot be read; try again") from error
            self._adapter_files[file] = self._compile(files)
            while len(self._adapter_files) > MAX_ADAPTER_TEMPLATES:
                self._adapter_files.popitem(last=False)
        self._adapter_files.move_to_end(file)
        return self._adapter_files[file]

    def _compile(self, files: ChatTemplateFiles) -> "_Templates":
        # If no template writes an added token, the token has no meaning in a conversation.
        other_tokens = [token for token in self._other_tokens if token in files.sources]
        return _Templates(files, ControlTokens(self._special_tokens, other_tokens))


class _Templates:
    """The templates of the checkpoint or of an adapter, compiled when they are first used."""

    def __init__(self, files: ChatTemplateFiles, control_tokens: ControlTokens) -> None:
        self.control_tokens = control_tokens
        self._files = files
        self._templates: dict[bool, ChatTemplate] = {}

    def get(self, has_tools: bool) -> ChatTemplate:
        """Return the template for a conversation with or without tools."""
        if has_tools not in self._templates:
            source = self._files.source(has_tools)
            if source is None:
                raise InvalidArgument("messages: the checkpoint has no chat template; use completions")
            self._templates[has_tools] = ChatTemplate(source, self._files.special_tokens)
        return self._templates[has_tools]


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
