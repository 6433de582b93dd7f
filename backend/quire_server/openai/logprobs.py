# SPDX-License-Identifier: Apache-2.0
"""Converts log probabilities to the formats of completions and of chat completions.

For each position, the text process returns an object whose keys are token ids. The first key is the token that was
sampled. The bytes of a single token may not be valid UTF-8. In that case, the token's text contains the replacement
character, and a separate field contains the bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

MIN_LOGPROB = -9999.0

Position = Mapping[str, Mapping[str, Any]]
"""Maps token ids to {logprob, rank, decoded_token}. The first token id is the token that was sampled."""


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
        entry: Mapping[str, Any] = (
            {"decoded_token": first_token_text} if position is None else position.get(str(token_id), {})
        )
        text = _token_name(str(token_id), entry, as_token_ids)
        tokens.append(text)
        text_offsets.append(text_offset)
        text_offset += len(text)
        token_logprobs.append(None if position is None else max(MIN_LOGPROB, entry.get("logprob", MIN_LOGPROB)))
        top_logprobs.append(
            None
            if position is None
            else {
                _token_name(i, other, as_token_ids): max(MIN_LOGPROB, other["logprob"]) for i, other in position.items()
            }
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
        entries = [_chat_entry(token_id, entry, as_token_ids) for token_id, entry in position.items()]
        ranks = [entry["rank"] for entry in position.values()]
        top = [entry for _, entry in sorted(zip(ranks, entries, strict=True), key=lambda pair: pair[0])]
        content.append({**entries[0], "top_logprobs": top if num_top < 0 else top[:num_top]})
    return {"content": content}


def _chat_entry(token_id: str, entry: Mapping[str, Any], as_token_ids: bool) -> dict[str, Any]:
    text = entry["decoded_token"] or ""
    return {
        "token": _token_name(token_id, entry, as_token_ids),
        "logprob": max(MIN_LOGPROB, entry["logprob"]),
        "bytes": entry.get("bytes") or list(text.encode()),
    }


def _token_name(token_id: str, entry: Mapping[str, Any], as_token_ids: bool) -> str:
    return f"token_id:{token_id}" if as_token_ids else entry.get("decoded_token") or ""
