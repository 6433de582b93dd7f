# SPDX-License-Identifier: Apache-2.0
"""Tokenizer files beside an adapter, as transformers saves them: copies of the base model's tokenizer are accepted in
any form, and added tokens are refused by name."""

import json
import shutil

import pytest
from support.tiny_checkpoints import make_adapter, make_checkpoint
from support.tokenizer import byte_level, save_tokenizer, sentencepiece
from transformers import AutoTokenizer

from quire_engine.api.llm import LLM
from quire_engine.api.outputs import LoRARequest
from quire_engine.tokenization.adapter_tokens import check_adapter_tokens
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.documents.adapter_digest import MAX_TOKENIZER_BYTES, TOKENIZER_FILES
from quire_spec.errors import InvalidArgument

BASES = {"byte level": byte_level, "sentencepiece": lambda: sentencepiece("llama")}


@pytest.fixture(params=BASES)
def base(request, tmp_path):
    config = {} if request.param == "byte level" else {"bos_token": None, "eos_token": None}
    return save_tokenizer(BASES[request.param](), tmp_path / "base", **config)


def _check(folder, base):
    check_adapter_tokens(folder, Tokenizer(base), base)


def _edit(path, change):
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def test_copies_of_the_base_models_tokenizer_are_accepted(base, tmp_path):
    """The file itself, what transformers writes after it read the file, and the file in another JSON format."""
    folder = tmp_path / "adapter"
    shutil.copytree(base, folder)
    _check(folder, base)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    _check(folder, base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        _edit(folder / name, lambda document: document.update(truncation=None, unknown=[1]))
    assert (folder / "tokenizer.json").read_bytes() != (base / "tokenizer.json").read_bytes()
    _check(folder, base)
    (folder / "tokenizer.json").unlink()
    _check(folder, base)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kept", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_added_tokens_are_refused_by_name(base, tmp_path, special, kept):
    tokenizer, folder = AutoTokenizer.from_pretrained(base), tmp_path / "adapter"
    num_tokens = len(tokenizer)
    tokenizer.add_tokens(["<tool>"], special_tokens=special)
    tokenizer.save_pretrained(folder)
    # Older versions of transformers wrote these two.
    added = {"content": "<tool>", "special": special}
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": num_tokens}))
    _edit(folder / "tokenizer_config.json", lambda config: config.update(added_tokens_decoder={num_tokens: added}))
    for name in {*TOKENIZER_FILES, kept} - {kept}:
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(InvalidArgument, match=rf"{kept} has the token '<tool>' with id {num_tokens}, which"):
        _check(folder, base)


@pytest.mark.parametrize("name", ["pad_token", "eos_token", "extra_special_tokens"])
def test_only_a_padding_token_can_be_added(base, tmp_path, name):
    tokenizer, folder = AutoTokenizer.from_pretrained(base), tmp_path / "adapter"
    tokenizer.add_special_tokens({name: ["<new>"] if name.endswith("tokens") else "<new>"})
    tokenizer.save_pretrained(folder)
    assert "<new>" in (folder / "tokenizer.json").read_text()
    if name == "pad_token":
        _check(folder, base)
        _edit(folder / "tokenizer_config.json", lambda config: config.update(eos_token="<new>"))
    with pytest.raises(InvalidArgument, match=r"'<new>'.*train the adapter without added tokens"):
        _check(folder, base)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InvalidArgument, match=r"tokenizer_config.json has the token '<new>'"):
        _check(folder, base)


def test_a_token_with_another_id_is_refused(base, tmp_path):
    folder, tokenizer = tmp_path / "adapter", Tokenizer(base)
    folder.mkdir()
    token = tokenizer.convert_ids_to_tokens(7)
    (folder / "added_tokens.json").write_text(json.dumps({token: 7}))
    _check(folder, base)
    (folder / "added_tokens.json").write_text(json.dumps({token: 8}))
    with pytest.raises(InvalidArgument, match=r"added_tokens.json has the token .* with id 8, .* has with id 7\."):
        _check(folder, base)


INVALID = [
    *(b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": {}}', b'{"pad_token": {}}', b'{"extra_special_tokens": 5}'),
    *(b'{"model": {"vocab": 7}}', b'{"model": {}, "added_tokens": [{"id": "x"}]}', b'{"added_tokens_decoder": [1]}'),
    *(b'{"added_tokens_decoder": {"x": {"content": "a"}}}', b'{"added_tokens_decoder": {"1": 2}}'),
]


@pytest.mark.parametrize("name", TOKENIZER_FILES)
@pytest.mark.parametrize("content", INVALID)
def test_invalid_files_are_refused_or_harmless(base, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    try:
        _check(tmp_path, base)
    except InvalidArgument as error:
        assert "the tokenizer files are invalid" in str(error) or "does not have" in str(error)


def test_a_huge_file_is_not_read(base, tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(InvalidArgument, match=r"tokenizer.json has 67108865 bytes; at most 67108864 are supported"):
        _check(tmp_path, base)


def test_an_engine_refuses_an_adapter_whose_tokenizer_adds_tokens(tmp_path):
    """A tokenizer that is written again is compared again."""
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    save_tokenizer(byte_level(320), checkpoint)
    adapter = make_adapter(checkpoint, tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.save_pretrained(adapter)
    llm, lora = LLM(checkpoint, device="cpu", enable_lora=True), LoRARequest("a", 1, str(adapter))
    assert llm.generate(["a"], lora_request=lora, use_tqdm=False)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(adapter)
    with pytest.raises(InvalidArgument, match=r"adapter '.*adapter': tokenizer.json has the token '<tool>' with id 32"):
        llm.generate(["a"], lora_request=lora, use_tqdm=False)
