# SPDX-License-Identifier: Apache-2.0
"""POST /generative_scoring: how likely a model that generates continues each text with a label, in the form of vLLM.

The engine generates one token for each item, and returns the log probabilities of the labels at this position.
"""

import math
from typing import Annotated, Any

from msgspec import Meta

from quire_server.openai.errors import ApiError
from quire_server.openai.formatter import encode
from quire_server.openai.generation import Prompt
from quire_server.openai.http.message import HttpRequest, Reply, Response
from quire_server.openai.pooling.pooling_request import MAX_INPUTS, PoolingFields, PoolingRequest, parse_pooling_fields
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec.engine.sampling_params import MAX_LOGPROB_TOKENS, SamplingParams
from quire_spec.errors import truncated_repr
from quire_spec.protocol.messages import OutputDelta
from quire_spec.protocol.results import Tokenized


class GenerativeScoringFields(PoolingFields, kw_only=True):
    """Fields of a request."""

    query: Any = None
    """A text, or token ids."""
    items: Any = None
    """A list of texts, or of lists of token ids."""
    label_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=MAX_LOGPROB_TOKENS)]
    """The score is the probability of the first one."""
    apply_softmax: bool = True
    """Whether the probabilities of the labels add up to 1; otherwise, all tokens count."""
    item_first: bool = False


class GenerativeScoring:
    """The route /generative_scoring."""

    def __init__(self, client: TextClient, settings: FrontSettings) -> None:
        self._client = client
        self._settings = settings

    async def score(self, request: HttpRequest) -> Reply:
        """POST /generative_scoring: return the probabilities of given tokens after each item."""
        document = await request.json_object()
        if document.get("label_token_ids") is None:
            raise ApiError(400, "label_token_ids: missing; give the token ids of the labels")
        fields = parse_pooling_fields(document, GenerativeScoringFields, request)
        if not isinstance(fields.items, list) or not 0 < len(fields.items) <= MAX_INPUTS:
            shown = f"a list of {len(fields.items)}" if isinstance(fields.items, list) else truncated_repr(fields.items)
            raise ApiError(400, f"items: must be a list of 1 to {MAX_INPUTS} texts or lists of token ids, got {shown}")
        query = await self._tokens(fields.query, "query", fields, request, fields.add_special_tokens)
        items = [await self._tokens(item, f"items[{i}]", fields, request, False) for i, item in enumerate(fields.items)]
        prompts = [Prompt(None, item + query if fields.item_first else query + item) for item in items]
        labels = tuple(fields.label_token_ids)
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=labels, ignore_eos=True)
        run = PoolingRequest("generative-scoring-", request, fields, self._settings)
        try:
            deltas = await run.run(self._client, prompts, params, None)
        except ApiError as error:
            if error.param == "logprob_token_ids":
                error.message = error.message.replace("sampling parameter 'logprob_token_ids'", "label_token_ids")
                error.param = "label_token_ids"
            raise
        data = [
            {"index": index, "object": "score", "score": _score(delta, labels, fields.apply_softmax)}
            for index, delta in enumerate(deltas)
        ]
        return Response(encode({**run.envelope(), "data": data, "usage": run.usage(len(deltas))}))

    async def _tokens(
        self, value: object, name: str, fields: GenerativeScoringFields, request: HttpRequest, adds_special_tokens: bool
    ) -> list[int]:
        """Return the token ids of a text; raises ApiError if `value` is neither a text nor token ids."""
        if isinstance(value, list) and set(map(type, value)) <= {int}:
            return value
        if not isinstance(value, str):
            raise ApiError(400, f"{name}: must be a text or a list of token ids, got {truncated_repr(value)}")
        args = {
            "prompt": value,
            "model": None if fields.model is None else self._settings.engine_model(fields.model),
            "add_special_tokens": adds_special_tokens,
            "api_key_name": request.api_key_name,
        }
        return (await self._client.call("tokenize", Tokenized, args)).tokens


def _score(delta: OutputDelta, labels: tuple[int, ...], apply_softmax: bool) -> float:
    """Return the probability of the first label."""
    [position] = delta.logprobs or [[]]
    logprob_by_token = {entry.token_id: entry.logprob for entry in position}
    logprobs = [logprob_by_token[label] for label in labels]
    if not apply_softmax:
        return math.exp(logprobs[0])
    highest = max(logprobs)
    return math.exp(logprobs[0] - highest) / sum(math.exp(logprob - highest) for logprob in logprobs)
