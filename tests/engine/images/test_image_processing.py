# SPDX-License-Identifier: Apache-2.0
"""Files of images become the tensors of transformers' processor, and the marks of a template their places."""

import ast
import importlib.util
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.image_checkpoints import FAMILIES, MARKS, add_image_tokenizer, bomb, make_image_checkpoint, png
from transformers import AutoImageProcessor

from quire_engine import LLM, SamplingParams
from quire_engine.images.placeholders import Placeholders
from quire_engine.images.processor import ImageProcessor, ProcessedImage
from quire_engine.images.support import why_no_images
from quire_engine.models.vision.tower import VisionTower
from quire_engine.requests.limits import RequestLimits
from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_engine.tokenization.control_tokens import END, START
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import InvalidArgument
from quire_spec.model.images.image_config import ImageConfig
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import ImageTensor

GEMMA4_TENSORS = ("pixel_values", "image_position_ids")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint whose tokenizer has the marks of images."""
    folder = make_image_checkpoint(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")
    return add_image_tokenizer(folder)


def _images(folder: Path) -> ImageConfig:
    images = ModelConfig.load(folder).images
    assert images is not None
    return images


def test_tensors_are_those_of_transformers_and_invalid_files_are_errors(folder: Path) -> None:
    processor = ImageProcessor(folder, _images(folder))
    first, second = processor.process(png(0)), processor.process(png(1))
    expected = AutoImageProcessor.from_pretrained(folder, backend="pil")(Image.open(io.BytesIO(png(1))))
    values = second.tensors["pixel_values"]
    tensor = torch.frombuffer(bytearray(values.data), dtype=torch.float32).view(values.shape)
    assert torch.equal(tensor, torch.tensor(expected["pixel_values"]))
    assert second.digest != first.digest and second.num_tokens == second.grid[0] * second.grid[1]
    for data, message in ((b"no image", "not a valid image"), (png(0)[:400], "not a valid image"), (bomb(), "pixels")):
        with pytest.raises(InvalidArgument, match=message):
            processor.process(data)


def test_gray_images_of_16_bits_look_like_those_of_8_bits(folder: Path) -> None:
    ramp, processor, files = (
        np.tile(np.arange(96, dtype=np.uint8), (64, 1)),
        ImageProcessor(folder, _images(folder)),
        [],
    )
    for pixels in (ramp, ramp.astype(np.uint16) * 257):
        files.append(io.BytesIO())
        Image.fromarray(pixels).save(files[-1], "PNG")
    assert Image.open(files[1]).mode == "I;16"
    assert processor.process(files[0].getvalue()) == processor.process(files[1].getvalue())


def test_transparent_images_get_a_white_background_and_rotated_ones_are_turned(folder: Path) -> None:
    processor, files, rotated = ImageProcessor(folder, _images(folder)), [], Image.Exif()
    rotated[0x0112] = 6  # the tag of the orientation: turned by 90 degrees
    pixels: list[tuple[str, tuple[int, int], object]] = [
        ("RGBA", (64, 96), (200, 0, 0, 0)),
        ("RGB", (64, 96), "white"),
        ("RGB", (96, 64), "white"),
    ]
    for mode, size, color in pixels:
        file = io.BytesIO()
        Image.new(mode, size, color).save(file, "PNG", exif=rotated if size == (96, 64) else b"")  # type: ignore[arg-type]
        files.append(file.getvalue())
    transparent, white, turned = map(processor.process, files)
    assert transparent == white and turned.grid == white.grid


def _tensor(image: ProcessedImage, name: str) -> torch.Tensor:
    tensor = image.tensors[name]
    return torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype)).view(tensor.shape)


def _processed(*num_tokens: int) -> list[ProcessedImage]:
    return [ProcessedImage(count, (1, count), bytes([i]), {}) for i, count in enumerate(num_tokens)]


def test_marks_of_a_template_are_places_of_images_and_marks_of_users_are_text(folder: Path) -> None:
    places = Placeholders(_images(folder), Tokenizer(folder))
    user = f"{START}{MARKS[0]}{END}"
    text = f"a {user} {MARKS[1]}{MARKS[0]}{MARKS[2]}{MARKS[0]}"
    expanded = places.expand(text, _processed(2, 3))
    assert expanded == f"a {user} {MARKS[1]}{MARKS[0] * 2}{MARKS[2]}{MARKS[0] * 3}"
    for images in ([], _processed(1), _processed(1, 1, 1)):
        with pytest.raises(InvalidArgument, match=f"has 2 places for {len(images)} images"):
            places.expand(text, images)
    token = _images(folder).token_id
    located = places.locate([1, token, token, 2, token, token, token], _processed(2, 3))
    assert [(image.start, image.num_tokens) for image in located] == [(1, 2), (4, 3)]
    for token_ids in ([1, token, 2, token, token, token], [1, *[token] * 2, 2, *[token] * 4]):
        with pytest.raises(InvalidArgument, match="tokens of images"):
            places.locate(token_ids, _processed(2, 3))


def test_marks_of_gemma_3_are_replaced_by_its_whole_sequence(folder: Path) -> None:
    images = ImageConfig("gemma3", _images(folder).token_id, num_tokens=3)
    text = Placeholders(images, Tokenizer(folder)).expand("a<start_of_image>b", _processed(3))
    assert text == f"a\n\n<start_of_image>{MARKS[0] * 3}<end_of_image>\n\nb"


def test_marks_of_gemma_4_are_replaced_by_its_three_tokens(folder: Path) -> None:
    token = _images(folder).token_id
    images = ImageConfig("gemma4", token, start_token_id=token + 2, end_token_id=token + 3)
    text = Placeholders(images, Tokenizer(folder)).expand(f"a{MARKS[0]}b", _processed(3))
    assert text == f"a{MARKS[1]}{MARKS[0] * 3}{MARKS[2]}b"


def test_rows_of_mistral_3_are_apart(folder: Path) -> None:
    token = _images(folder).token_id
    places = Placeholders(ImageConfig("mistral3", token, token_pixels=28), Tokenizer(folder))
    image = ProcessedImage(8, (0, 0), b"", {}, line_length=3)
    two = MARKS[0] * 2
    assert places.expand(f"a{MARKS[0]}b", [image]) == f"a{two}[IMG_BREAK]{two}[IMG_BREAK]{two}[IMG_END]b"
    row = [token, token]
    (located,) = places.locate([1, *row, 2, *row, 2, *row, 3], [image])
    assert (located.start, located.num_tokens, located.line_length) == (1, 8, 3)
    with pytest.raises(InvalidArgument, match="has 6 tokens of images, and its images have 6"):
        places.locate([1, *row, *row, 2, *row, 2], [image])


def test_patches_of_gemma_4_without_an_encoder_are_those_of_transformers(tmp_path: Path) -> None:
    """Its processor needs torchvision, which Quire does not install. Only these two functions of it are called here."""
    folder = make_image_checkpoint(tmp_path, "gemma4_unified-vision")
    images = _images(folder)
    values, positions = (_tensor(ImageProcessor(folder, images).process(png(0)), name) for name in GEMMA4_TENSORS)
    small = ImageProcessor(folder, replace(images, tower="gemma4")).process(png(0))
    file = importlib.util.find_spec("transformers.models.gemma4_unified.image_processing_gemma4_unified").origin  # type: ignore[union-attr]
    code = ast.parse(Path(str(file)).read_text())
    code.body = [part for part in code.body if isinstance(part, ast.FunctionDef) and part.name == "patches_merge"]
    functions: dict[str, Any] = {"torch": torch, "math": math}
    exec(compile(code, str(file), "exec"), functions)
    num_patches = 9 * small.num_tokens
    patches = [_tensor(small, name)[:, :num_patches] for name in GEMMA4_TENSORS]
    merged, merged_positions = functions["patches_merge"](*patches, small.num_tokens)
    assert torch.equal(values[:, : small.num_tokens], merged) and (values[:, small.num_tokens :] == 0).all()
    assert torch.equal(positions[:, : small.num_tokens], merged_positions)
    assert (positions[:, small.num_tokens :] == -1).all()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mistral3-mistral4"])
def test_each_weight_of_a_tower_changes_its_output(name: str, tmp_path: Path) -> None:
    folder = make_image_checkpoint(tmp_path, name)
    tower = VisionTower(folder, _images(folder), torch.float32, torch.device("cpu"))
    tensors = ImageProcessor(folder, _images(folder)).process(png(0)).tensors

    def encode() -> torch.Tensor:
        features = tower.encode(tensors)
        return torch.stack((features.embeddings, *features.deepstack))

    expected = encode()
    for path, tensor in tower._module.state_dict().items():
        copy = tensor.clone()
        tensor.fill_(float("inf" if path.endswith("_max") else "-inf" if path.endswith("_min") else 0))
        change = (encode() - expected).abs().max()
        tensor.copy_(copy)
        # Adding the same number to all keys of a head does not change its attention.
        assert change > 1e-4 * expected.abs().max() or path.endswith("k_proj.bias"), path


def test_why_a_checkpoint_reads_no_images(folder: Path, tmp_path: Path) -> None:
    shape, config = ModelConfig.load(folder), EngineConfig(str(folder))
    assert why_no_images(config, shape, folder) is None
    drafter = SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=2)
    for changes, message in (
        ({"language_model_only": True}, "without language_model_only"),
        ({"limit_mm_per_prompt": {"image": 0}}, "limit_mm_per_prompt allows none"),
        ({"speculative_config": drafter}, "not possible with speculative_config.method"),
    ):
        reason = why_no_images(EngineConfig(str(folder), **changes), shape, folder)  # type: ignore[arg-type]
        assert reason is not None and message in reason
    assert "has no preprocessor_config.json" in str(why_no_images(config, shape, tmp_path))


def test_images_that_no_step_or_frame_has_room_for_are_refused(folder: Path) -> None:
    tokenizer, shape = Tokenizer(folder), ModelConfig.load(folder)
    images = ImageConfig("gemma3", _images(folder).token_id, num_tokens=9, bidirectional="all")
    templates, pixels = ChatTemplateFiles(None, None, {}), ImageTensor("float32", [1], bytes(2**26 + 4))
    for num_seqs, max_tokens in ((8, 9), (9, 8), (17, 1)):
        config = EngineConfig(str(folder), max_num_batched_tokens=17, max_num_seqs=num_seqs)
        limits = RequestLimits.from_config(config, replace(shape, images=images), tokenizer, frozenset(), templates)
        assert limits.max_image_tokens == max_tokens
        limits.check_images(_processed(max_tokens))
        with pytest.raises(InvalidArgument, match=r"images\[1\]: has .* must be computed in one step"):
            limits.check_images(_processed(1, max_tokens + 1))
    large = [replace(image, tensors={"pixel_values": pixels}) for image in _processed(1, 1, 1)]
    with pytest.raises(InvalidArgument, match=r"images: the 3 images have .* bytes after they were resized"):
        limits.check_images(large)


def test_the_offline_llm_takes_images_with_a_text(folder: Path) -> None:
    llm = LLM(model=folder, dtype="float32", max_model_len=64, limit_mm_per_prompt={"image": 2})
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    text = f"the quick {MARKS[1]}{MARKS[0]}{MARKS[2]} fox"
    image = Image.open(io.BytesIO(png(0)))
    prompts = [{"prompt": text, "multi_modal_data": {"image": value}} for value in (image, [png(0)], png(1))]
    first, same, other = llm.generate(prompts, params, use_tqdm=False)
    assert first.outputs[0].token_ids == same.outputs[0].token_ids
    assert first.prompt_token_ids != other.prompt_token_ids
    for prompt, message in (
        ({"prompt": text * 3, "multi_modal_data": {"image": [png(0)] * 3}}, "at most 2 are allowed, got 3"),
        ({"prompt": text, "multi_modal_data": {"image": b"?"}}, r"images\[0\]: is not a valid image"),
        ({"prompt": text, "multi_modal_data": {"audio": b"?"}}, "multi_modal_data: must be"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": png(0)}}, "not possible with prompt_token_ids"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            llm.generate(prompt, params, use_tqdm=False)
    with pytest.raises(InvalidArgument, match="truncate_prompt_tokens: not possible with images"):
        llm.generate(prompts, SamplingParams(max_tokens=1, truncate_prompt_tokens=5), use_tqdm=False)
