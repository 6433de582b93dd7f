# SPDX-License-Identifier: Apache-2.0
"""Images in requests of the three APIs get equal answers, wrong ones end their own requests, and the front fetches
images only over HTTPS, from hosts of the allow list, at public addresses, and within limits."""

import base64
import ssl

import aiohttp
import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.engine_processes import wait_for
from support.fake_sources import start_server
from support.image_checkpoints import (
    CHAT_TEMPLATE,
    IMAGE_TOKEN,
    MARKS,
    ImagePrompt,
    add_image_tokenizer,
    bomb,
    greedy,
    make_image_checkpoint,
    png,
)
from support.near_ties import assert_greedy_tokens
from support.openai_front import running_front
from support.tiny_checkpoints import load_oracle

from quire_engine.images.processor import ImageProcessor
from quire_server.openai.errors import ApiError
from quire_server.openai.images import image_loader
from quire_server.openai.images.image_loader import ImageLoader
from quire_server.openai.images.image_parts import ImageUrl
from quire_sources.http.borders import Borders
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import ImageInput

PATH = "messages[0].content[0].image_url"
HOSTS = ["localhost", "127.0.0.1", "10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:7f00:1]", "[fd00::1]"]


async def load(url: str, *allowed: str) -> bytes:
    [data] = await ImageLoader(allowed).load([ImageUrl(PATH, url)])
    return data


@pytest.mark.parametrize("host", HOSTS)
async def test_an_allowed_host_with_a_private_address_is_refused(host):
    with pytest.raises(ApiError, match="are not allowed"):
        await load(f"https://{host}/a.png")
    with pytest.raises(ApiError, match=r"never reads from loopback|its address is private") as error:
        await load(f"https://{host}/a.png", host.strip("[]"))
    assert error.value.status == 400 and error.value.message.startswith(PATH)


@pytest.fixture
async def server(monkeypatch):
    """Serve images with a certificate that clients trust, at an address that counts as public."""
    authority, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    client_context = ssl.create_default_context()
    authority.configure_trust(client_context)
    monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", client_context)
    monkeypatch.setattr(Borders, "refusal", lambda *_: None)
    monkeypatch.setattr(image_loader, "MAX_IMAGE_BYTES", 1000)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")  # it would resolve the name itself

    async def handle(request: web.Request) -> web.StreamResponse:
        sizes = {"/a.png": 10, "/large.png": 1001}
        if request.path in sizes:
            return web.Response(body=b"a" * sizes[request.path])
        if request.path == "/endless.png":
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(100):
                await response.write(b"a" * 100)
            return response
        if request.path == "/away.png":
            return web.Response(status=302, headers={"Location": "https://elsewhere.example/a.png"})
        return web.Response(status=404)

    server: TestServer = await start_server(handle, context)
    yield f"https://localhost:{server.port}"
    await server.close()


async def test_images_of_allowed_hosts_are_fetched_within_limits(server):
    assert await load(f"{server}/a.png", "LOCALHOST") == b"a" * 10
    for name, message in (
        ("large", "has more than 1000 bytes"),
        ("endless", "has more than 1000 bytes"),
        ("away", "redirects to another host, which is not followed"),
        ("missing", "does not exist; check the URL"),
    ):
        with pytest.raises(ApiError, match=message):
            await load(f"{server}/{name}.png", "localhost")
    with pytest.raises(ApiError, match="no response from"):
        await load("https://localhost:1/a.png", "localhost")


@pytest.fixture(scope="module")
def vision_front(tmp_path_factory):
    """A front for a model that reads images."""
    folder = tmp_path_factory.mktemp("vision")
    add_image_tokenizer(make_image_checkpoint(folder / "model", "qwen3_vl"))
    (folder / "model/chat_template.jinja").write_text(CHAT_TEMPLATE)
    with running_front(folder, model=folder / "model", max_model_len=256) as front:
        # On a busy machine, the processes that read images take longer to start than a request waits.
        wait_for(lambda: _chat(front, png(2)).status == 200, what="the processes that read images")
        yield front


def _data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _chat(front, *images: bytes, text: str = "fox", **fields):
    parts = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in images]
    messages = [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]
    body = {"model": "base", "messages": messages, "temperature": 0, "ignore_eos": True, "max_tokens": 5}
    return front.request("/v1/chat/completions", body | fields)


def test_the_three_apis_answer_alike_and_a_wrong_image_ends_its_own_request(vision_front):
    neighbour = vision_front.client().chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": "the"}],
        max_tokens=200,
        stream=True,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    first, again, other = (_chat(vision_front, image) for image in (png(0), png(0), png(1)))
    usage = [answer.body["usage"] for answer in (first, again, other)]
    assert usage[0]["prompt_tokens_details"]["cached_tokens"] == 0 < usage[1]["prompt_tokens_details"]["cached_tokens"]
    contents = [answer.body["choices"][0]["message"]["content"] for answer in (first, again, other)]
    assert contents[0] == contents[1] != contents[2]
    response = vision_front.request(
        "/v1/responses",
        {
            "model": "base",
            "temperature": 0,
            "ignore_eos": True,
            "max_output_tokens": 5,
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "fox"},
                        {"type": "input_image", "image_url": _data_url(png(0))},
                    ],
                }
            ],
        },
    )
    assert response.body["output"][0]["content"][0]["text"] == contents[0]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(0)).decode()}
    blocks = [{"type": "text", "text": "fox"}, {"type": "image", "source": source}]
    body = {"model": "base", "max_tokens": 5, "temperature": 0, "messages": [{"role": "user", "content": blocks}]}
    message = vision_front.request("/v1/messages", body | {"ignore_eos": True})
    assert message.body["content"][0]["text"] == contents[0]
    count = vision_front.request("/v1/messages/count_tokens", body)
    assert count.body == {"input_tokens": usage[0]["prompt_tokens"]}
    for images, text in (
        ((b"no image",), r"images[0]: is not a valid image"),
        ((png(0), png(0)[:400]), r"images[1]: is not a valid image"),
        ((bomb(),), r"images[0]: has too many pixels"),
        ((png(0),) * 9, "images: at most 8 are allowed, got 9"),
    ):
        answer = _chat(vision_front, *images)
        assert answer.status == 400 and text in answer.message
    # The mark of an image in the text of a user is text.
    assert _chat(vision_front, png(0), text="a <|image_pad|>").status == 200
    assert len(list(neighbour)) > 100


@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("gemma4-vision", (MARKS[0], "<|video_pad|>", *MARKS[1:])),
        ("mistral3", ("[IMG]", "[IMG_BREAK]", "<s1>", "[IMG_END]")),
        ("mistral3-mistral4", ("[IMG]", "[IMG_BREAK]", "<s1>", "[IMG_END]")),
    ],
)
def test_answers_of_other_families_equal_transformers(tmp_path, name, marks):
    """Their templates contain one mark for each image, which becomes the whole sequence of tokens of the image."""
    folder = add_image_tokenizer(make_image_checkpoint(tmp_path / "model", name, max_soft_tokens=70), marks)
    template = CHAT_TEMPLATE.replace("".join((MARKS[1], MARKS[0], MARKS[2])), marks[0])
    (folder / "chat_template.jinja").write_text(template)
    processor = ImageProcessor(folder, ModelConfig.load(folder).images)
    images = [processor.process(png(seed)) for seed in (0, 1)]
    with running_front(tmp_path, model=folder, max_model_len=256, dtype="float32") as front:
        wait_for(lambda: _chat(front, png(2)).status == 200, what="the processes that read images")
        fields = {"return_token_ids": True, "allowed_token_ids": list(range(IMAGE_TOKEN)), "max_tokens": 8}
        answer = _chat(front, png(0), png(1), **fields)
    assert answer.status == 200, answer
    prompt, [choice] = answer.body["prompt_token_ids"], answer.body["choices"]
    start, inputs = 0, []
    for image in images:
        start = prompt.index(IMAGE_TOKEN, start)
        sizes = image.grid, image.tensors, image.line_length
        inputs.append(ImageInput(start, image.num_tokens, image.digest, *sizes))
        start += image.num_tokens
    assert IMAGE_TOKEN not in prompt[start:]
    expected, logprobs = greedy(load_oracle(folder), ImagePrompt(prompt, inputs), 8)
    assert_greedy_tokens(choice["token_ids"], expected, logprobs)
