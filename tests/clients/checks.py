# SPDX-License-Identifier: Apache-2.0
"""Checks of a running OpenAI front with the client that users have; run.py starts both.

Runs in the environment of requirements.txt, which contains nothing of Quire: `python checks.py BASE_URL`.
"""

import asyncio
import sys

import openai

MODELS = ("tales", "pirate", "sql")
GREEDY = {"max_tokens": 12, "temperature": 0}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell a story."}]


def check_openai(url):
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    cards = {card.id: card for card in client.models.list()}
    assert set(MODELS) <= set(cards) and cards["sql"].parent == "tales"
    texts = {}
    for model in MODELS:
        whole = client.completions.create(model=model, prompt="Once upon a time", **GREEDY)
        chunks = client.completions.create(model=model, prompt="Once upon a time", stream=True, **GREEDY)
        texts[model] = whole.choices[0].text
        assert "".join(chunk.choices[0].text for chunk in chunks) == texts[model]
        assert whole.usage.completion_tokens == 12 and whole.model == model
    assert len(set(texts.values())) == 3, texts
    # The client's own stream raises an error for an answer that the length limit ends.
    stopped = {"max_tokens": 200, "temperature": 0, "stop": ["a", "e", "o", "\n"], "extra_body": {"min_tokens": 6}}
    chat = client.chat.completions.create(model="tales", messages=MESSAGES, **stopped)
    with client.chat.completions.stream(model="tales", messages=MESSAGES, **stopped) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.content == chat.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    assert {event.type for event in events} >= {"chunk", "content.delta", "content.done"}
    raw = client.chat.completions.with_raw_response.create(model="tales", messages=MESSAGES, **GREEDY)
    assert raw.headers["x-request-id"] and raw.parse().choices
    for error, fields in (
        (openai.NotFoundError, {"model": "absent"}),
        (openai.BadRequestError, {"model": "tales", "temperature": -1}),
        (openai.BadRequestError, {"model": "tales", "extra_body": {"guided_json": {}}}),
    ):
        try:
            client.completions.create(prompt="a", **fields)
        except error as caught:
            assert caught.body["message"] and caught.body["code"] == caught.status_code
        else:
            raise AssertionError(f"no {error.__name__} for {fields}")


def check_openai_asyncio(url):
    async def stream(client, model):
        stream = await client.completions.create(
            model=model, prompt="Once upon a time", stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens == 12 and not chunks[-1].choices

    async def run():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await asyncio.gather(*(stream(client, model) for model in MODELS * 8))

    asyncio.run(run())


def main(url):
    """Run all checks; the first failure ends the run."""
    for check in (check_openai, check_openai_asyncio):
        check(url)
        print(f"openai {openai.__version__}: {check.__name__} passed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
