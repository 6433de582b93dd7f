# SPDX-License-Identifier: Apache-2.0
"""Writes the tokenizer in the metadata of a GGUF file as files that tokenizer_files.py reads.

A SentencePiece model becomes tokenizer.model, and a byte-level BPE model becomes tokenizer.json. The metadata does not
contain the pattern that splits a text before BPE, but only its name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from quire_engine.tokenization.sentencepiece_model import write_sentencepiece_model
from quire_engine.tokenization.tokenizer_config import TOKENIZER_FILE
from quire_spec.documents.tokenizer_files import FORMATS, TOKENIZER_CONFIG_FILE
from quire_spec.errors import ConfigError

TOKENIZER_FILES = (
    *(name for _, names in FORMATS for name in names),
    *(TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja", "generation_config.json"),
)
"""Files that a user can put beside the GGUF file."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "llama-bpe": _WORDS % "{1,3}",
    "qwen2": _WORDS % "",
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
"""Maps tokenizer.ggml.pre to the pattern of the words."""
_CONTROL, _USER_DEFINED = 3, 4
_FIX = "put the model's tokenizer.json and tokenizer_config.json beside the .gguf file"


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write the files of the tokenizer to `folder`.

    Raises:
        ConfigError: the metadata has no tokenizer, or one of a kind that is not supported.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int, len(tokens))
    config: dict[str, Any] = {"add_bos_token": _add(metadata, "bos", kind == "llama"), "add_eos_token": False}
    for name in ("bos", "eos"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, int) and token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    if kind == "llama":
        scores = _list(metadata, "scores", float, len(tokens))
        names = str(config.get("bos_token", "<s>")), str(config.get("eos_token", "</s>"))
        has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
        model = write_sentencepiece_model(list(zip(tokens, scores, types, strict=True)), *names, has_prefix)
        (folder / "tokenizer.model").write_bytes(model)
        config["tokenizer_class"] = "LlamaTokenizer"
    elif kind == "gpt2":
        tokenizer = _build_byte_level(metadata, tokens, types)
        if config["add_bos_token"] and "bos_token" in config:
            bos = config["bos_token"]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], special_tokens=[(bos, tokens.index(bos))]
            )
        tokenizer.save(str(folder / TOKENIZER_FILE))
    else:
        raise ConfigError(f"tokenizer.ggml.model {kind!r} is not supported; {_FIX}")
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(config, indent=1))


def _build_byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    pattern_name = metadata.get("tokenizer.ggml.pre")
    pattern = _PATTERNS.get(str(pattern_name))
    if pattern is None:
        raise ConfigError(f"tokenizer.ggml.pre {pattern_name!r} is not one of {', '.join(_PATTERNS)}; {_FIX}")
    merges = [tuple(merge.split(" ")) for merge in _list(metadata, "merges", str)]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab, merges, ignore_merges=pattern_name == "llama-bpe")
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError(f"tokenizer.ggml.merges: {error}; {_FIX}") from error
    tokenizer = tokenizers.Tokenizer(model)
    if pattern_name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def _list(metadata: Mapping[str, Any], name: str, kind: type, length: int | None = None) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    is_list = isinstance(values, list) and all(type(value) is kind for value in values)
    if not isinstance(values, list) or not is_list or (length is not None and len(values) != length):
        raise ConfigError(f"tokenizer.ggml.{name} is missing or wrong; {_FIX}")
    return values


def _add(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    return metadata.get(f"tokenizer.ggml.add_{name}_token", default) is True
