# SPDX-License-Identifier: Apache-2.0
"""Tokenizers in tekken.json and in tiktoken files: equal to mistral-common and to tiktoken.

`byte_pair_ranks/tekken.json` has ranks of a small corpus and the pattern of Mistral's files. The ids are those of
`Tekkenizer` in mistral-common 1.13.1 and, for the classes of tiktoken files, of tiktoken 0.14.0 with the patterns and
the normalization of the classes. The development environment has neither.
"""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from quire_engine.tokenization.tokenizer import Tokenizer
from quire_engine.tokenization.tokenizer_config import read_eos_token_id
from quire_spec.documents.tokenizer_files import FORMATS, TIKTOKEN_CLASSES, TokenizerFormat
from quire_spec.errors import ConfigError

FOLDER = Path(__file__).parent / "byte_pair_ranks"
TEKKEN = json.loads((FOLDER / "tekken.json").read_text())
IDS = json.loads((FOLDER / "ids.json").read_text())
FILES = dict(zip(TIKTOKEN_CLASSES, ("tiktoken.model", "hy.tiktoken", "qwen.tiktoken"), strict=True))
NUM_RANKS = len(TEKKEN["vocab"])


def tekken_folder(folder: Path, document: Any = TEKKEN, config: Any = None) -> Path:
    (folder / "tekken.json").write_text(json.dumps(document))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def tiktoken_folder(folder: Path, name: str, **config: Any) -> Path:
    lines = [f"{token['token_bytes']} {token['rank']}\n" for token in TEKKEN["vocab"]]
    (folder / FILES[name]).write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **config}))
    return folder


@pytest.mark.parametrize("name", IDS)
def test_ids_equal_the_reference(tmp_path: Path, name: str) -> None:
    config = {"split_special_tokens": True}
    folder = tekken_folder(tmp_path, config=config) if name == "tekken" else tiktoken_folder(tmp_path, name, **config)
    tokenizer = Tokenizer(folder)
    for text, ids in IDS[name]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert name in ("HYTokenizer", "QWenTokenizer") or tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes.bytes_of, ids)) == tokenizer.decode(ids).encode()


def test_tekken_begins_with_its_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tekken_folder(tmp_path))
    assert tokenizer.vocab_size == TEKKEN["config"]["default_vocab_size"]
    assert [tokenizer.convert_ids_to_tokens(i) for i in (0, 1, 2, 8, 11)] == [
        *("<unk>", "<s>", "</s>", "[/THINK]", "<SPECIAL_11>")
    ]
    assert tokenizer.encode("the[INST]") == [1, *tokenizer.encode("the", add_special_tokens=False), 3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)
    assert set(range(12)) == set(tokenizer.special_token_ids)
    # Older files do not contain the special tokens.
    older = {**TEKKEN, "special_tokens": None, "config": {**TEKKEN["config"], "default_num_special_tokens": 30}}
    tokenizer = Tokenizer(tekken_folder(tmp_path, older))
    assert [tokenizer.convert_ids_to_tokens(i) for i in (9, 11, 19, 29)] == [
        *("[TOOL_CALLS]", "<pad>", "[TOOL_CONTENT]", "<SPECIAL_29>")
    ]


def test_special_tokens_follow_the_ranks_of_a_tiktoken_file(tmp_path: Path) -> None:
    named = {str(NUM_RANKS + 1): {"content": "<|im_user|>", "special": True}}
    tokenizer = Tokenizer(tiktoken_folder(tmp_path, "TikTokenTokenizer", added_tokens_decoder=named))
    assert tokenizer.encode("<|im_user|>") == [NUM_RANKS + 1] and tokenizer.vocab_size == NUM_RANKS + 258
    assert tokenizer.convert_ids_to_tokens(NUM_RANKS) == f"<|reserved_token_{NUM_RANKS}|>"
    (tmp_path / "tiktoken.model").unlink()
    tokenizer = Tokenizer(tiktoken_folder(tmp_path, "HYTokenizer", eos_token="<|eos|>"))
    assert tokenizer.eos_token_id == NUM_RANKS + 3 and tokenizer.vocab_size == NUM_RANKS + 210
    (tmp_path / "hy.tiktoken").unlink()
    tokenizer = Tokenizer(tiktoken_folder(tmp_path, "QWenTokenizer"))
    assert tokenizer.encode("<|im_end|>") == [NUM_RANKS + 2] and tokenizer.vocab_size == NUM_RANKS + 208


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {**TEKKEN, "vocab": TEKKEN["vocab"][:100]},
        {**TEKKEN, "vocab": TEKKEN["vocab"][5:]},
        {**TEKKEN, "config": {**TEKKEN["config"], "default_num_special_tokens": 3}},
        {**TEKKEN, "config": {**TEKKEN["config"], "default_num_special_tokens": 10**9}},
        {**TEKKEN, "config": {**TEKKEN["config"], "pattern": "("}},
        {**TEKKEN, "vocab": [{"rank": 0, "token_bytes": "*"}]},
    ],
    ids=str,
)
def test_a_wrong_tekken_file_is_named(tmp_path: Path, document: Any) -> None:
    with pytest.raises(ConfigError, match=r"tekken\.json: not a tekken\.json: .*; download it again"):
        Tokenizer(tekken_folder(tmp_path, document))


def test_a_wrong_tiktoken_file_is_named(tmp_path: Path) -> None:
    folder = tiktoken_folder(tmp_path, "HYTokenizer")
    for content in ("", "version https://git-lfs.github.com/spec/v1\n", "YQ==\n", "YQ== x\n", "a b c"):
        (folder / "hy.tiktoken").write_text(content)
        with pytest.raises(ConfigError, match=r"hy\.tiktoken: not a tiktoken file: .*; download it again"):
            Tokenizer(folder)
    for name in (None, "MyTokenizer", ["QWenTokenizer"]):
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        with pytest.raises(ConfigError, match=r"cannot be built from hy\.tiktoken.*save tokenizer\.json"):
            Tokenizer(folder)


def test_each_tiktoken_file_belongs_to_a_class() -> None:
    files = {name for kind, names in FORMATS for name in names if kind is TokenizerFormat.TIKTOKEN}
    assert files == set(FILES.values()) and base64.b64decode(TEKKEN["vocab"][0]["token_bytes"]) == b"\0"


def test_the_end_token_of_tekken_is_known_without_the_tokenizer(tmp_path: Path) -> None:
    assert read_eos_token_id(tekken_folder(tmp_path)) == 2
