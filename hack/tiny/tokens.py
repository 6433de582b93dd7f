# SPDX-License-Identifier: Apache-2.0
"""From documents to token ids: trains the tokenizer and packs documents into rows.

Knows no model. `train` writes what it makes; `learn` consumes the rows.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from corpus import Document
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
IGNORED = -100
"""The label of a token that is given and not learned; the value that torch's cross entropy skips."""


def train_tokenizer(documents: Iterator[Document], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; digits stand alone, so that a number is copied digit by digit. Encoding adds BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.prompt + document.text for document in documents), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_tokens: int) -> None:
    """Write `tokenizer.json` and the `tokenizer_config.json` that transformers wants beside it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _encoded(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[int]]:
    """Ids and labels of one document, BOS to EOS; the prompt and BOS have label IGNORED."""
    prompt: list[int] = tokenizer.encode(document.prompt).ids
    text: list[int] = [*tokenizer.encode(document.text, add_special_tokens=False).ids, EOS_ID]
    return prompt + text, [IGNORED] * len(prompt) + text


def _rows(
    tokenizer: Tokenizer, documents: Iterator[Document], row_tokens: int
) -> Iterator[tuple[list[int], list[int]]]:
    # Each row starts with a document, as a request does; what does not fit of its last document is dropped.
    while True:
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < row_tokens:
            more_ids, more_labels = _encoded(tokenizer, next(documents))
            ids += more_ids
            labels += more_labels
        yield ids[:row_tokens], labels[:row_tokens]


def batches(
    tokenizer: Tokenizer, documents: Iterator[Document], num_rows: int, row_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless pairs of ids and labels, each `[num_rows, row_tokens]` int64; labels are not shifted."""
    rows = _rows(tokenizer, documents, row_tokens)
    while True:
        ids, labels = zip(*islice(rows, num_rows), strict=True)
        yield torch.tensor(ids), torch.tensor(labels)
