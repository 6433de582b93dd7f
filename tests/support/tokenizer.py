# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of each kind that checkpoints use, created in memory, with the files that transformers requires."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog, then sleeps. ", "Grüße aus Köln, 你好世界 🙂 naïve café\n"] * 8


def make_tokenizer(kind: str) -> tokenizers.Tokenizer:
    """Return a tokenizer of a kind: byte_level, gpt2, llama, gemma, metaspace, unigram or words."""
    if kind in ("byte_level", "gpt2"):
        return byte_level(prefix_space=kind == "gpt2")
    return {"unigram": unigram, "words": word_level}[kind]() if kind in ("unigram", "words") else sentencepiece(kind)


def byte_level(vocab_size: int = 384, prefix_space: bool = False) -> tokenizers.Tokenizer:
    """Return a byte-level BPE like that of Llama 3 and Qwen2, with `<s>` before a prompt. GPT-2 may add a space to
    texts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
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


def sentencepiece(kind: str) -> tokenizers.Tokenizer:
    """Return a converted SentencePiece model: `kind` llama (Replace, ByteFallback, Fuse, Strip), gemma (no Strip), or
    metaspace (only Metaspace)."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, limit_alphabet=40, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    # The trainer writes no byte tokens: give the trained model a vocabulary that begins with them.
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    tokens = special + bytes_ + [w for w in sorted(model["vocab"], key=model["vocab"].get) if w not in special]
    vocab = {word: i for i, word in enumerate(tokens)}
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


def unigram() -> tokenizers.Tokenizer:
    """Return a Unigram model like that of T5 and XLM-R: byte fallback, and a space before every text."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    spec = json.loads(tokenizer.to_str())
    pieces = [*spec["model"]["vocab"], *([f"<0x{byte:02X}>", -20.0] for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(models.Unigram([tuple(piece) for piece in pieces], unk_id=0, byte_fallback=True))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always"), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tokenizer


def word_level() -> tokenizers.Tokenizer:
    """Return a word-level tokenizer without a decoder: the library joins tokens with spaces."""
    vocab = {word: i for i, word in enumerate(["<s>", "</s>", "the", "quick", "brown", "fox", "é", "🙂"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="the"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path, **config: Any) -> Path:
    """Write the files of a tokenizer into `folder`, with `config` added to tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(defaults | config), encoding="utf-8")
    return folder
