# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of each kind that checkpoints have, made in memory, with the files that transformers wants."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog, then sleeps. ", "Grüße aus Köln, 你好世界 🙂 naïve café\n"] * 8


def byte_level(vocab_size: int = 384) -> tokenizers.Tokenizer:
    """As Llama 3 and Qwen2 have: bytes as characters, merged; `<s>` before a prompt."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("  added — ", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def sentence_piece(kind: str) -> tokenizers.Tokenizer:
    """As SentencePiece models are converted: `kind` llama (Replace, ByteFallback, Fuse, Strip), gemma (no Strip),
    or metaspace (Metaspace alone)."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, limit_alphabet=40, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    # The trainer writes no byte tokens: give the trained model a vocabulary that begins with them.
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    words = special + bytes_ + [w for w in sorted(model["vocab"], key=model["vocab"].get) if w not in special]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.add_special_tokens(special)
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if kind == "llama" else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def save(tokenizer: tokenizers.Tokenizer, folder: Path, **config: Any) -> Path:
    """Write the files of a tokenizer into `folder`, with `config` added to tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config), encoding="utf-8")
    return folder
