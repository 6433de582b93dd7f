# SPDX-License-Identifier: Apache-2.0
"""Tiny random encoders with the tokenizers of their families, and their vectors from transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from peft import LoraConfig, PeftModel
from support.tiny_checkpoints import library_warnings_ignored, save_random_adapter, trained_tensors
from support.tokenizer import CORPUS, save_tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    DistilBertConfig,
    ModernBertConfig,
    MPNetConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

VOCAB = 384
_BASE = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
_BASE |= {"intermediate_size": 112, "max_position_embeddings": 130}
_TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_MODERN = {**_TOKENS, "cls_token_id": 0, "sep_token_id": 2, "local_attention": 8, "norm_bias": True}
ENCODERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "bert": (BertConfig, {"pad_token_id": 1}),
    "roberta": (RobertaConfig, {**_TOKENS, "type_vocab_size": 1}),
    "xlm_roberta": (XLMRobertaConfig, {**_TOKENS, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "distilbert": (DistilBertConfig, {"hidden_dim": 96, "pad_token_id": 1}),
    "mpnet": (MPNetConfig, {**_TOKENS, "max_position_embeddings": 402}),
    "modernbert": (ModernBertConfig, _MODERN),
    "modernbert_mean": (
        ModernBertConfig,
        {**_MODERN, "norm_bias": False, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
        | {"classifier_pooling": "mean", "max_position_embeddings": 900},
    ),
}
TARGETS = {
    "bert": ["query", "key", "value", "dense"],
    "roberta": ["query", "key", "value", "dense"],
    "xlm_roberta": ["query", "value"],
    "distilbert": ["q_lin", "out_lin", "lin1", "lin2"],
    "mpnet": ["q", "k", "v", "o", "dense"],
    "modernbert": ["Wqkv", "Wo", "Wi", "dense"],
    "modernbert_mean": ["Wqkv", "Wi"],
}
_CLASSES = {"none": AutoModel, "mlm": AutoModelForMaskedLM, "score": AutoModelForSequenceClassification}
_CLASSES["token"] = AutoModelForTokenClassification


def make_encoder(folder: Path, name: str, head: str = "none", pooling: str = "", **config: Any) -> Path:
    """Write an encoder; `head` is none, mlm or score. `pooling` writes the files of sentence-transformers."""
    kind, overrides = ENCODERS[name]
    torch.manual_seed(len(name))
    model = _CLASSES[head].from_config(kind(**{**_BASE, **overrides, **config}), dtype=torch.float32)
    with torch.no_grad():
        for tensor in trained_tensors(model).values():
            tensor.add_(torch.randn_like(tensor) * (0.3 if tensor.dim() < 2 else 0.1))
    model.save_pretrained(folder)
    if pooling:
        modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        entries = [{"path": path, "type": f"sentence_transformers.models.{each}"} for path, each in modules]
        (folder / "1_Pooling").mkdir()
        (folder / "modules.json").write_text(json.dumps(entries))
        (folder / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    names = {"token_type_ids": {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}}
    tokenizer = _word_piece() if name == "bert" else _byte_level(name)
    return save_tokenizer(tokenizer, folder, **(names["token_type_ids"] if name == "bert" else {}))


def load(folder: Path, adapter: Path | None = None, dtype: torch.dtype = torch.float32, num_labels: int = 0) -> Any:
    """The checkpoint in transformers; with `adapter` in peft, not merged."""
    is_classifier = "Classification" in json.loads((folder / "config.json").read_text())["architectures"][0]
    options = {"num_labels": num_labels, "ignore_mismatched_sizes": True} if num_labels else {}
    kind = AutoModelForSequenceClassification if is_classifier else AutoModel
    with library_warnings_ignored():
        model = kind.from_pretrained(folder, dtype=dtype, **options)
        return (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()


def make_encoder_adapter(folder: Path, name: str, checkpoint: Path, num_labels: int = 0) -> Path:
    """Write an adapter; with `num_labels`, one with its own head."""
    torch.manual_seed(7)
    task = "SEQ_CLS" if num_labels else "FEATURE_EXTRACTION"
    config = LoraConfig(r=8, target_modules=TARGETS[name], task_type=task)
    return save_random_adapter(load(checkpoint, num_labels=num_labels), config, folder)


@torch.inference_mode()
def embed(model: Any, prompt: list[int], pooling: str = "cls_token", types: list[int] | None = None) -> torch.Tensor:
    """Return the embedding as sentence-transformers computes it."""
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    hidden = model(torch.tensor([prompt]), **given).last_hidden_state[0].float()
    return torch.nn.functional.normalize(hidden[0] if pooling == "cls_token" else hidden.mean(0), dim=0)


@torch.inference_mode()
def score(model: Any, folder: Path, first: str, second: str | None = None) -> torch.Tensor:
    """Return the scores of a text or of a pair [num_labels], before their activation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return model(**tokenizer(first, second, return_tensors="pt")).logits[0].float()


def _word_piece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[CLS]", "[PAD]", "[SEP]", "[UNK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 2)]
    )
    return tokenizer


def _byte_level(name: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    separator = "</s> </s>" if "roberta" in name else "</s>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=f"<s> $A {separator} $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer
