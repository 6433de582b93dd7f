# SPDX-License-Identifier: Apache-2.0
"""The files in which a checkpoint can contain its tokenizer. The planner looks for them, and the engine reads them."""

from collections.abc import Callable
from enum import StrEnum

from quire_spec.errors import ConfigError

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


class TokenizerFormat(StrEnum):
    """Format of a tokenizer."""

    TOKENIZERS = "tokenizers"
    """tokenizer.json of the `tokenizers` library."""
    SENTENCEPIECE = "sentencepiece"
    BYTE_LEVEL = "byte-level"
    """vocab.json and merges.txt, as GPT-2 has them."""
    TEKKEN = "tekken"
    """tekken.json of Mistral."""
    TIKTOKEN = "tiktoken"
    """Ranks in a text file. The class of the tokenizer has the pattern and the special tokens."""


FORMATS: tuple[tuple[TokenizerFormat, tuple[str, ...]], ...] = (
    (TokenizerFormat.TOKENIZERS, ("tokenizer.json",)),
    (TokenizerFormat.SENTENCEPIECE, ("tokenizer.model",)),
    (TokenizerFormat.BYTE_LEVEL, ("vocab.json", "merges.txt")),
    (TokenizerFormat.TEKKEN, ("tekken.json",)),
    (TokenizerFormat.TIKTOKEN, ("tiktoken.model",)),
    (TokenizerFormat.TIKTOKEN, ("hy.tiktoken",)),
    (TokenizerFormat.TIKTOKEN, ("qwen.tiktoken",)),
)
"""The formats and their files. The first format whose files exist is used."""
ALL_FORMATS = ", ".join(" with ".join(names) for _, names in FORMATS)
"""The files of all formats, for messages."""
TIKTOKEN_CLASSES = ("TikTokenTokenizer", "HYTokenizer", "QWenTokenizer")
"""Values of tokenizer_class whose pattern and special tokens the engine knows: Kimi, Hunyuan and Qwen 1."""


def check_tiktoken_class(config_path: object, name: object, file: str) -> None:
    """Raise ConfigError if the engine cannot read a tiktoken file, because it does not know the tokenizer's class."""
    if name not in TIKTOKEN_CLASSES:
        raise ConfigError(
            f"{config_path}: tokenizer_class {name!r} cannot be built from {file}, because this file does not contain "
            f"the pattern and the special tokens; supported classes are {', '.join(TIKTOKEN_CLASSES)}; for another "
            "class, save tokenizer.json with save_pretrained of transformers"
        )


def find_tokenizer(exists: Callable[[str], bool]) -> tuple[TokenizerFormat, tuple[str, ...]] | None:
    """Return the format and the files of a checkpoint's tokenizer; None if it has none. `exists` returns whether the
    checkpoint has a file of this name."""
    return next(((kind, names) for kind, names in FORMATS if all(map(exists, names))), None)
