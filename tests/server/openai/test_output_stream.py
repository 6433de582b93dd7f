# SPDX-License-Identifier: Apache-2.0
"""The deltas of a stream contain every token once, and as many tokens as the client wants in one event."""

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_server.openai.errors import ApiError
from quire_server.openai.output_stream import MAX_PENDING_TOKENS, OutputStream
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import GenerateRequest, OutputDelta


class Client:
    """Records what a stream cancels."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def cancel(self, request_ids: list[int]) -> None:
        self.cancelled += request_ids


def make_stream(num_requests: int, stream_interval: int) -> tuple[Any, Client]:
    client = Client()
    requests = [GenerateRequest(i, "base", "a", None, SamplingParams(), True) for i in range(num_requests)]
    return OutputStream(client, requests, stream_interval), client  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(1, 3), st.booleans()), max_size=60),
    st.integers(1, 5),
)
async def test_deltas_have_the_wanted_number_of_tokens(
    appends: list[tuple[int, int, int, bool]], stream_interval: int
) -> None:
    stream, _ = make_stream(2, stream_interval)
    sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[OutputDelta]] = defaultdict(list)

    async def read() -> None:
        for request_index, delta in await stream.next(0):
            received[request_index, delta.index].append(delta)

    ends = [(request_id, index, 1, True) for request_id in range(2) for index in range(2)]
    for number, (request_id, index, num_tokens, reads) in enumerate(appends + ends):
        is_end = number >= len(appends)
        token_ids = [number * 10 + i for i in range(num_tokens)]
        sent[request_id, index] += token_ids
        text = "".join(f"<{i}>" for i in token_ids)
        stream.push(
            OutputDelta(
                request_id,
                text,
                token_ids,
                "stop" if is_end else None,
                num_output_tokens=len(sent[request_id, index]),
                index=index,
                other_outputs_pending=index == 0,
            )
        )
        if reads:
            await read()
    assert stream.is_complete
    for key, tokens in sent.items():
        deltas = received[key]
        assert [i for delta in deltas for i in delta.token_ids] == tokens
        assert "".join(delta.text for delta in deltas) == "".join(f"<{i}>" for i in tokens)
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
        assert deltas[-1].num_output_tokens == len(tokens)
        lengths = [len(delta.token_ids) for delta in deltas]
        assert all(stream_interval <= length < stream_interval + 3 for length in lengths[1:-1])
        assert lengths[0] <= 3


@pytest.mark.parametrize("stream_interval", [1, 7])
async def test_a_client_that_reads_too_slowly_fails(stream_interval: int) -> None:
    stream, client = make_stream(1, stream_interval)
    for number in range(MAX_PENDING_TOKENS + 10):
        stream.push(OutputDelta(0, "x", [number]))
    with pytest.raises(ApiError, match="reads too slowly"):
        await stream.next(0)
    assert client.cancelled == [0]
