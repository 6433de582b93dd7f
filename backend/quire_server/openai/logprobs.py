# SPDX-License-Identifier: Apache-2.0
"""Converts log probabilities to the formats of completions and of chat completions.

For each position, the text process returns a list of tokens. The first one is the token that was sampled. The bytes of
a single token may not be valid UTF-8. In that case, the token's text contains the replacement character, and a separate
field contains the bytes.
"""

from collections.abc import Sequence
from typing import Any

from quire_spec.protocol.messages import TokenLogprob

MIN_LOGPROB = -9999.0

Position = Sequence[TokenLogprob]
"""Tokens at one position. The first one is the token that was sampled."""


def completion_logprobs(
    positions: Sequence[Position | None],
    token_ids: Sequence[int],
    text_offset: int,
    as_token_ids: bool,
    first_token_text: str = "",
) -> tuple[dict[str, Any], int]:
    """Return the object `logprobs` of a completion, and the text offset at which its last token ends.

    The first token of a prompt has no log probabilities, so its position is None. `first_token_text` is the text of
    this token.
    """
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offsets: list[int] = []
    for position, token_id in zip(positions, token_ids, strict=False):
        entries = () if position is None else position
        if position is None:
            entry = TokenLogprob(token_id, MIN_LOGPROB, 0, first_token_text)
        else:
            entry = next((e for e in entries if e.token_id == token_id), TokenLogprob(token_id, MIN_LOGPROB, 0))
        text = _token_name(entry, as_token_ids)
        tokens.append(text)
        text_offsets.append(text_offset)
        text_offset += len(text)
        token_logprobs.append(None if position is None else max(MIN_LOGPROB, entry.logprob))
        top_logprobs.append(
            None
            if position is None
            else {_token_name(other, as_token_ids): max(MIN_LOGPROB, other.logprob) for other in entries}
        )
    document = {
        "text_offset": text_offsets,
        "token_logprobs": token_logprobs,
        "tokens": tokens,
        "top_logprobs": top_logprobs,
    }
    return document, text_offset


def chat_logprobs(positions: Sequence[Position], num_top: int, as_token_ids: bool) -> dict[str, Any]:
    """Return the object `logprobs` of a chat completion. For each position, it contains the `num_top` most likely
    tokens."""
    content = []
    for position in positions:
        entries = [_chat_entry(entry, as_token_ids) for entry in position]
        ranks = [entry.rank for entry in position]
        top = [entry for _, entry in sorted(zip(ranks, entries, strict=True), key=lambda pair: pair[0])]
        content.append({**entries[0], "top_logprobs": top if num_top < 0 else top[:num_top]})
    return {"content": content}


def _chat_entry(entry: TokenLogprob, as_token_ids: bool) -> dict[str, Any]:
    token_bytes = entry.token_bytes or (entry.text or "").encode()
    return {
        "token": _token_name(entry, as_token_ids),
        "logprob": max(MIN_LOGPROB, entry.logprob),
        "bytes": list(token_bytes),
    }


def _token_name(entry: TokenLogprob, as_token_ids: bool) -> str:
    return f"token_id:{entry.token_id}" if as_token_ids else entry.text or ""
