# SPDX-License-Identifier: Apache-2.0
"""Token ids and decoded text equal those of transformers, and broken tokenizer files are rejected."""

from pathlib import Path

import pytest
from support.tokenizer import byte_level, save_tokenizer
from tokenizers import Regex, decoders, pre_tokenizers
from transformers import AutoTokenizer

from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import ConfigError, InvalidArgument

TEXTS = [
    "",
    " ",
    "the quick brown fox",
    "  two spaces, a tab\t and\n\n lines ",
    "Grüße 你好 🙂🙂 \u200d zero width",
    "<s>not special to a user?</s>",
    "a  added — b",
    "x" * 3000,
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_encode_and_decode_match_transformers(
    tokenizer_folders: dict[str, Path], tokenizers_by_kind: dict[str, Tokenizer], kind: str, text: str
):
    reference = AutoTokenizer.from_pretrained(tokenizer_folders[kind])
    assert tokenizers_by_kind[kind].encode(text) == reference(text)["input_ids"]
    ids = tokenizers_by_kind[kind].encode(text)
    for skip in (True, False):
        assert tokenizers_by_kind[kind].decode(ids, skip) == reference.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": False, "add_eos_token": True},
        {"bos_token": {"__type": "AddedToken", "content": "fox", "lstrip": True, "normalized": False, "special": True}},
        {"additional_special_tokens": ["quick", "<|new|>"]},
        {"added_tokens_decoder": {"999": {"content": "lazy dog", "special": False, "normalized": False}}},
        {"split_special_tokens": True},
    ],
    ids=str,
)
def test_tokenizer_config_is_applied_as_in_transformers(tmp_path: Path, config: dict[str, object]):
    folder = save_tokenizer(byte_level(), tmp_path, **config)
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer(folder)
    for text in ("", "the quick brown fox over the lazy dog <|new|>", "<s>the</s>"):
        ids = tokenizer.encode(text)
        assert ids == reference(text)["input_ids"]
        assert tokenizer.decode(ids) == reference.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_truncation_and_padding_of_training_are_ignored(tmp_path: Path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert len(Tokenizer(save_tokenizer(tokenizer, tmp_path)).encode("x" * 10)) == 11


def test_token_text(tokenizers_by_kind: dict[str, Tokenizer]):
    tokenizer = tokenizers_by_kind["byte_level"]
    text = "the quick 𝄞"
    ids = tokenizer.encode(text)
    assert "".join(tokenizer.token_text(i) for i in ids[1:]).startswith("the quick ")
    assert tokenizer.token_text(0) == "<s>"
    assert tokenizer.token_text(10**6) == ""
    assert (
        tokenizer.max_token_bytes
        == max(len(tokenizer.token_bytes.bytes_of(i)) for i in range(tokenizer.vocab_size))
        > 10
    )


def test_bad_word_has_ids_for_the_start_of_a_text_and_after_a_space() -> None:
    """Also if it has fewer tokens after a space."""
    tokenizer = Tokenizer(Path(__file__).resolve().parents[3] / "examples/models/tiny")
    id_lists = tokenizer.bad_word_ids(["there", " Zoe"])
    assert [tokenizer.decode(ids) for ids in id_lists] == ["there", " there", "Zoe", " Zoe"]
    assert len(id_lists[0]) > len(id_lists[1])
    # The same tokens after a space: one entry matches both.
    assert len(tokenizer.bad_word_ids(["xyzzy"])) == 1


def test_errors_contain_the_file_and_the_cause(tmp_path: Path, tokenizers_by_kind: dict[str, Tokenizer]):
    with pytest.raises(InvalidArgument, match="surrogate"):
        tokenizers_by_kind["llama"].encode("a\ud800")
    assert Tokenizer.from_folder(tmp_path) is None
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    unknown = byte_level()
    unknown.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match="CTC"):
        Tokenizer(save_tokenizer(unknown, tmp_path))
    config = save_tokenizer(byte_level(), tmp_path) / "tokenizer_config.json"
    for text in ("[1", "[1]", '{"added_tokens_decoder": {"x": {}}}', '{"bos_token": {"special": true}}'):
        config.write_text(text)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
            Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("parts", "unsupported_type"),
    [
        ([decoders.Fuse(), decoders.Metaspace()], "Metaspace"),
        ([decoders.Fuse(), decoders.ByteLevel()], "ByteLevel"),
        ([decoders.ByteLevel(), decoders.Metaspace()], "Metaspace"),
        ([decoders.ByteLevel(), decoders.ByteFallback()], "ByteFallback"),
        ([decoders.ByteFallback(), decoders.ByteLevel()], "ByteLevel"),
    ],
)
def test_unsupported_decoder_sequences_are_rejected(tmp_path: Path, parts: list[object], unsupported_type: str):
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence(parts)
    with pytest.raises(ConfigError, match=f'decoder {{"type": "{unsupported_type}".* is not supported'):
        Tokenizer(save_tokenizer(tokenizer, tmp_path))


def test_a_panic_of_the_library_is_an_error_of_the_text(tmp_path: Path):
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+b"), "isolated")
    tokenizer = Tokenizer(save_tokenizer(backend, tmp_path))
    text = "a" * 41
    for name, encode in {
        "the prompt": lambda: tokenizer.encode(text),
        "messages": lambda: tokenizer.encode_rendered(text),
        "bad_words": lambda: tokenizer.bad_word_ids([text]),
    }.items():
        with pytest.raises(InvalidArgument, match=f"{name}: the tokenizer of this model cannot encode .*retry-limit"):
            encode()
    assert tokenizer.encode("a fox")
