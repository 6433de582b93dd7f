# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of checkpoints without tokenizer.json: equal to transformers and to SentencePiece.

The models and ids in `sentencepiece/` come from sentencepiece 0.2.1, which the development environment does not have.
"""

import json
from pathlib import Path

import pytest
from support.tokenizer import byte_level
from transformers import GPT2Tokenizer

from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import ConfigError

MODELS = Path(__file__).parent / "sentencepiece"
IDS = json.loads((MODELS / "ids.json").read_text())
_END = {
    "__type": "AddedToken",
    "content": "</s>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
}
OPT_CONFIG = {  # of facebook/opt-125m, with the names of the test's vocabulary
    "errors": "replace",
    "unk_token": _END,
    "bos_token": _END,
    "eos_token": _END,
    "add_prefix_space": False,
    "add_bos_token": True,
    "special_tokens_map_file": None,
    "tokenizer_class": "GPT2Tokenizer",
}


def sentencepiece_folder(folder: Path, name: str, **config: object) -> Path:
    (folder / "tokenizer.model").write_bytes((MODELS / f"{name}.model").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", IDS)
def test_ids_equal_those_of_sentencepiece(tmp_path: Path, name: str):
    tokenizer = Tokenizer(sentencepiece_folder(tmp_path, name, add_bos_token=False))
    for text, ids in IDS[name]:
        assert tokenizer.encode(text) == ids, text
    if name == "llama":
        for text, ids in IDS[name]:
            assert tokenizer.decode(ids) == text


def test_a_sentencepiece_tokenizer_adds_its_first_and_last_token(tmp_path: Path):
    tokenizer = Tokenizer(sentencepiece_folder(tmp_path, "llama", add_eos_token=True, tokenizer_class="LlamaTokenizer"))
    _, ids = IDS["llama"][2]
    assert tokenizer.encode("the quick brown fox") == [1, *ids, 2]
    assert tokenizer.decode([1, *ids, 2]) == "the quick brown fox" and {0, 1, 2} <= set(tokenizer.special_token_ids)


@pytest.mark.parametrize("config", [OPT_CONFIG, {}, {"add_prefix_space": True}], ids=["opt", "gpt2", "prefix"])
def test_vocabulary_and_merges_equal_transformers(tmp_path: Path, config: dict[str, object]):
    byte_level().model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference, tokenizer = GPT2Tokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    for text in ("", " ", "the quick brown fox", "  two\t\n\n lines ", "Grüße 你好 🙂", "<s>the</s> dog", "x" * 300):
        ids = tokenizer.encode(text)
        assert ids == reference(text)["input_ids"], text
        assert tokenizer.decode(ids) == reference.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_wrong_files_are_named(tmp_path: Path):
    folder = sentencepiece_folder(tmp_path, "llama", bos_token=None)
    with pytest.raises(ConfigError, match="bos_token None is not in the vocabulary"):
        Tokenizer(folder)
    sentencepiece_folder(tmp_path, "llama", tokenizer_class="T5Tokenizer")
    with pytest.raises(ConfigError, match=r"'T5Tokenizer' cannot be built from tokenizer\.model; save tokenizer\.json"):
        Tokenizer(folder)
    for content in (b"", b"\xff" * 20, b"version https://git-lfs.github.com/spec/v1"):
        (folder / "tokenizer.model").write_bytes(content)
        (folder / "tokenizer_config.json").write_text("{}")
        with pytest.raises(ConfigError, match=r"tokenizer\.model.*download it again"):
            Tokenizer(folder)
    (folder / "tokenizer.model").unlink()
    (folder / "vocab.json").write_text("[1]")
    assert Tokenizer.from_folder(folder) is None
    (folder / "merges.txt").write_text("a b\n")
    with pytest.raises(ConfigError, match=r"vocab\.json with merges\.txt"):
        Tokenizer(folder)
