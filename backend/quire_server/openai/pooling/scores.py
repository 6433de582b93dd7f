# SPDX-License-Identifier: Apache-2.0
"""POST /v1/score, /v1/rerank and /v1/classify, in the forms of vLLM and, for rerank, of Jina and Cohere.

A classifier reads both texts of a pair together, and its only class is the score. With a model for embeddings, the
score is the cosine between the embeddings of the two texts.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from quire_server.openai.completions import parse_prompts
from quire_server.openai.errors import ApiError
from quire_server.openai.formatter import encode
from quire_server.openai.generation import Prompt
from quire_server.openai.http.message import HttpRequest, Reply, Response
from quire_server.openai.pooling.pooling_request import (
    MAX_INPUTS,
    PoolingFields,
    PoolingRequest,
    floats,
    parse_pooling_fields,
)
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec.engine.pooling_params import PoolingParams, cosine
from quire_spec.errors import truncated_repr
from quire_spec.protocol.messages import Conversation, to_raw
from quire_spec.protocol.results import ServedModels

_SCORE_NAMES = {
    **dict.fromkeys(("data_1", "queries"), "text_1"),
    **dict.fromkeys(("data_2", "documents", "items"), "text_2"),
}
"""The other names that vLLM has for the fields of a request for scores."""


class ScoreFields(PoolingFields, kw_only=True):
    """Fields of a request for scores."""

    text_1: Any = None
    """A text, or a list of texts."""
    text_2: Any = None
    """A text, or a list of texts. If text_1 is one text, it is compared with each of them; otherwise, the texts are
    compared in pairs."""


class RerankFields(PoolingFields, kw_only=True):
    """Fields of a request to sort documents."""

    query: Any = None
    documents: Any = None
    """A list of texts, or of objects {text}."""
    top_n: int = 0
    """Number of results; 0: all documents."""
    return_documents: bool = True


class ClassifyFields(PoolingFields, kw_only=True):
    """Fields of a request for classes."""

    input: Any = None
    """See EncodedFields."""


class Scores:
    """The routes that return scores."""

    def __init__(self, client: TextClient, settings: FrontSettings) -> None:
        self._client = client
        self._settings = settings

    async def score(self, request: HttpRequest) -> Reply:
        """POST /v1/score: score pairs of texts."""
        fields = parse_pooling_fields(await request.json_object(), ScoreFields, request, _SCORE_NAMES)
        firsts, seconds = _texts(fields.text_1, "text_1"), _texts(fields.text_2, "text_2")
        if len(firsts) not in (1, len(seconds)):
            raise ApiError(
                400, f"text_1: has {len(firsts)} texts and text_2 has {len(seconds)}; give one, or equally many"
            )
        run = PoolingRequest("score-", request, fields, self._settings)
        scores = await self._scores(run, firsts, seconds, fields)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return Response(encode({**run.envelope(), "data": data, "usage": run.usage()}))

    async def rerank(self, request: HttpRequest) -> Reply:
        """POST /v1/rerank: sort documents by their scores."""
        fields = parse_pooling_fields(await request.json_object(), RerankFields, request)
        if not isinstance(fields.query, str) or not fields.query:
            raise ApiError(400, f"query: must be a text, got {truncated_repr(fields.query)}")
        documents = _texts(_document_texts(fields.documents), "documents")
        if fields.top_n < 0:
            raise ApiError(400, f"top_n: must be 0 or more, got {fields.top_n}; or omit it")
        run = PoolingRequest("rerank-", request, fields, self._settings)
        scores = await self._scores(run, [fields.query], documents, fields)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: fields.top_n or None]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
        if fields.return_documents:
            results = [result | {"document": {"text": documents[result["index"]]}} for result in results]
        return Response(encode({"id": run.id, "model": run.model, "usage": run.usage(), "results": results}))

    async def classify(self, request: HttpRequest) -> Reply:
        """POST /v1/classify: return the probabilities of the classes."""
        fields = parse_pooling_fields(await request.json_object(), ClassifyFields, request)
        prompts, fields.input = parse_prompts(fields.input, "input", MAX_INPUTS), None
        run = PoolingRequest("classify-", request, fields, self._settings)
        pooling = PoolingParams(task="classify", use_activation=fields.use_activation)
        vectors = [floats(vector) for vector in await run.vectors(self._client, prompts, pooling)]
        labels = (await self._client.pooling()).labels
        data = [
            {
                "index": index,
                "label": _label(labels, vector),
                "probs": vector,
                "num_classes": len(vector),
            }
            for index, vector in enumerate(vectors)
        ]
        return Response(encode({**run.envelope(), "data": data, "usage": run.usage()}))

    async def _scores(
        self, run: PoolingRequest, firsts: Sequence[str], seconds: Sequence[str], fields: PoolingFields
    ) -> list[float]:
        """Return the score of each pair. A single first text belongs to all pairs."""
        served = await self._client.pooling()
        if not served.pooling_task:
            raise ApiError(
                400,
                "model: only generates, so it has no scores; start the server with --convert embed or classify, use "
                "/generative_scoring, or another model",
            )
        if served.pooling_task == "embed":
            prompts = [Prompt(text) for text in (*firsts, *seconds)]
            embeddings = await run.vectors(self._client, prompts, PoolingParams())
            # This can take a second.
            return await asyncio.to_thread(_cosines, embeddings, len(firsts))
        pairs = zip([*firsts] * (len(seconds) // len(firsts)), seconds, strict=True)
        prompts = [_pair_prompt(*pair, served) for pair in pairs]
        pooling = PoolingParams(task="classify", use_activation=fields.use_activation)
        vectors = [floats(vector) for vector in await run.vectors(self._client, prompts, pooling)]
        if len(vectors[0]) != 1:
            raise ApiError(
                400, f"model: has {len(vectors[0])} classes, and a score needs a classifier with one; use /v1/classify"
            )
        return [score for [score] in vectors]


def _label(labels: Sequence[str], probabilities: Sequence[float]) -> str:
    """Return the name of the most likely class. The classes of an adapter's own head have no names."""
    index = max(range(len(probabilities)), key=probabilities.__getitem__)
    return labels[index] if len(labels) == len(probabilities) else f"LABEL_{index}"


def _pair_prompt(query: str, document: str, served: ServedModels) -> Prompt:
    """Return the prompt of a pair. A chat template for scores has the roles query and document; without it, the
    tokenizer of an encoder joins the texts, and with a decoder they follow each other, as in vLLM."""
    if not served.has_score_template and served.joins_pairs:
        return Prompt(query, second_text=document)
    if not served.has_score_template:
        return Prompt(query + document)
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return Prompt(chat=Conversation(to_raw(messages, "documents"), add_generation_prompt=False))


def _texts(value: object, name: str) -> list[str]:
    """Return one or several texts; raises ApiError if the value has another form."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        shown = "it is missing" if value is None else f"got {truncated_repr(value)}"
        raise ApiError(400, f"{name}: must be a text or a list of texts that are not empty, {shown}", name)
    if len(texts) > MAX_INPUTS:
        raise ApiError(400, f"{name}: at most {MAX_INPUTS} texts are allowed, got {len(texts)}; send fewer", name)
    return texts


def _document_texts(value: object) -> object:
    """Replace objects {text} by their texts."""
    if not isinstance(value, list):
        return value
    return [item.get("text") if isinstance(item, Mapping) else item for item in value]


def _cosines(embeddings: Sequence[bytes], num_firsts: int) -> list[float]:
    """Return the cosines between the first embeddings and the others. A single first one belongs to all pairs."""
    firsts = [floats(vector) for vector in embeddings[:num_firsts]]
    seconds = embeddings[num_firsts:]
    pairs = zip(firsts * (len(seconds) // num_firsts), seconds, strict=True)
    return [cosine(first, floats(second)) for first, second in pairs]
