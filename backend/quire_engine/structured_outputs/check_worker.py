# SPDX-License-Identifier: Apache-2.0
"""Process that checks constraints: `python -m quire_engine.structured_outputs.check_worker`, started by checker.py.

Compiling a constraint can take any amount of time and memory. Therefore, this process has a memory limit, and the text
process kills it when a check takes too long. The process reads lines, each of which contains a JSON object. The first
line contains the folder of the checkpoint, and each further line contains a constraint. The process answers each line
with one line.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire_engine.ipc.process import set_parent_death_signal
from quire_engine.structured_outputs.compiler import GrammarCompiler
from quire_engine.structured_outputs.grammar_text import document_to_grammar_text
from quire_spec.errors import PROCESS_ENDS, Code, InvalidArgument, QuireError, error_text

MAX_MEMORY_BYTES = 1 * 2**30


class CheckWorker:
    """Checks constraints for one checkpoint."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._folder, self._vocab_size, self._eos_token_ids = Path(folder), vocab_size, eos_token_ids
        self._compiler: GrammarCompiler | None = None

    def answer(self, constraint: dict[str, Any]) -> dict[str, Any]:
        """Compile a constraint. Return the grammar text of the constraint, or an error if the constraint does not
        compile."""
        try:
            text = document_to_grammar_text(constraint)
            self._get_compiler().check(text)
        except QuireError as error:
            return {"error_code": error.code, "error": error_text(error)}
        except (MemoryError, RecursionError):
            return _invalid("needs too much memory; simplify it")
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            return _invalid(f"cannot be compiled ({type(error).__name__}); simplify it")
        return {"grammar": text}

    def warm_up(self) -> None:
        """Load the tokenizer and compile a schema, so that the first request does not wait for this."""
        with suppress(InvalidArgument):
            self._get_compiler()
            self.answer({"json": {"type": "object", "properties": {"a": {"type": "string"}}}})
            self.answer({"choice": ["a"]})

    def _get_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler.from_folder(self._folder, self._vocab_size, self._eos_token_ids)
        return self._compiler


def _invalid(problem: str) -> dict[str, Any]:
    return {"error_code": Code.INVALID_ARG, "error": f"structured_outputs: the constraint {problem}"}


def main() -> None:
    """Answer each line of the standard input, until the input ends."""
    set_parent_death_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    worker = CheckWorker(**json.loads(sys.stdin.readline()))
    worker.warm_up()
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
