# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of every kind that the token bytes table supports."""

from pathlib import Path

import pytest
from support.tokenizer import make_tokenizer, save_tokenizer

from quire_engine.tokenization.tokenizer import Tokenizer

KINDS = ("byte_level", "gpt2", "llama", "gemma", "metaspace", "unigram", "words")


@pytest.fixture(scope="module")
def tokenizer_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with tokenizer.json, by kind."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: save_tokenizer(make_tokenizer(kind), root / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def tokenizers_by_kind(tokenizer_folders: dict[str, Path]) -> dict[str, Tokenizer]:
    """The tokenizers of `tokenizer_folders`."""
    return {kind: Tokenizer(folder) for kind, folder in tokenizer_folders.items()}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind in turn."""
    return str(request.param)
