# SPDX-License-Identifier: Apache-2.0
"""A random Llama of a given shape, as a Hugging Face folder with a tokenizer: `python checkpoint.py SHAPE FOLDER`.

Speed does not depend on what the weights say, but the check of outputs does. Their spread makes greedy output wander
through the vocabulary (at transformers' 0.02 it repeats one token), while bfloat16 still chooses tokens within 0.1
standard deviations of the logits of float32's (0.5 at a spread of 0.1).
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "initializer_range": 0.04,
    },
}


def cached(shape: str) -> Path:
    """The folder of a shape in the temporary folder; made once, in a process that ends, because it imports torch."""
    folder = Path(tempfile.gettempdir()) / f"quire-bench-{os.getuid()}-{shape}"
    if not (folder / "tokenizer_config.json").exists():  # the last file that is written
        subprocess.run([sys.executable, __file__, shape, str(folder)], check=True)
    return folder


def make(shape: str, folder: Path) -> None:
    """Write weights in bfloat16, seed 0, tied; and a byte-level tokenizer trained on the text that every Python has."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    fixed = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], **fixed, dtype="bfloat16"))
    model.to(torch.bfloat16).save_pretrained(folder)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    size, alphabet = SHAPES[shape]["vocab_size"], pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    library = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    files = (path for path in library if "site-packages" not in path.parts)
    tokenizer.train_from_iterator((path.read_text(errors="ignore") for path in files), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
