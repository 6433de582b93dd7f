# SPDX-License-Identifier: Apache-2.0
"""A random Llama or BERT of a given shape, as a Hugging Face folder with a tokenizer.

Speed does not depend on the weights' values, but the output check does. With this standard deviation, greedy output
varies (at transformers' 0.02 it repeats one token), and bfloat16 still selects tokens within 0.1 standard deviations of
float32's logits (0.5 at a deviation of 0.1).
"""

import json
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

_FIXED: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_135M: dict[str, Any] = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
_135M |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "initializer_range": 0.04}
SHAPES: dict[str, dict[str, Any]] = {"135m": _135M, "135m-150k": _135M | {"vocab_size": 151936}}
SHAPES["135m-8-layers"] = _135M | {"num_hidden_layers": 8}
# BERT-base with the vocabulary of the tokenizer.
SHAPES["bert-base"] = {"vocab_size": 49152, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
SHAPES["bert-base"] |= {"num_attention_heads": 12, "initializer_range": 0.04}


def cached_checkpoint(shape: str) -> Path:
    """The folder of a shape, in the temporary folder; made the first time, with imports of torch and transformers."""
    folder = Path(tempfile.gettempdir()) / f"quire-bench-{os.getuid()}-{shape}"
    if not (folder / "tokenizer_config.json").exists():  # the last file that is written
        _write_weights(SHAPES[shape], folder)
        _write_tokenizer(SHAPES[shape]["vocab_size"], folder)
    return folder


def _write_weights(shape: dict[str, Any], folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if "num_key_value_heads" in shape:
        model: Any = LlamaForCausalLM(LlamaConfig(**_FIXED | shape, dtype="bfloat16"))
    else:
        model = BertModel(BertConfig(**shape, max_position_embeddings=512, dtype="bfloat16"))
    model.to(torch.bfloat16).save_pretrained(folder)


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Byte-level, trained on the text that every Python has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    library = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    files = (path for path in library if "site-packages" not in path.parts)
    tokenizer.train_from_iterator((path.read_text(errors="ignore") for path in files), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
