# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that return vectors, and an oracle of them: transformers' last hidden states, then the formulas that
sentence-transformers documents for its modules Pooling, Dense and Normalize."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import BASE, CHECKPOINTS, library_warnings_ignored, save_random_adapter
from support.tokenizer import byte_level, save_tokenizer
from torch.nn import functional
from transformers import AutoModel, AutoModelForSequenceClassification

VOCAB = 384
_PACKAGE = "sentence_transformers"


def make_embedding_model(
    folder: Path, name: str = "qwen3", mode: str = "lasttoken", dense: int = 0, normalize: bool = True, **config: Any
) -> Path:
    """Write a checkpoint with the files of sentence-transformers; `dense` is the output size of a Dense layer."""
    changed = CHECKPOINTS[name][1] | {"vocab_size": VOCAB, "pad_token_id": 0}
    kind = CHECKPOINTS[name][0]
    write = {**BASE, **changed}
    torch.manual_seed(1)
    model = AutoModel.from_config(kind(**write), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    # As the checkpoints of the hub: the inner model, under the name of the one with an output projection.
    model.save_pretrained(folder)
    document = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(document))
    modules = [("", "models.Transformer"), ("1_Pooling", "models.Pooling")]
    _write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 64, f"pooling_mode_{mode}": True})
    if dense:
        values = {"in_features": 64, "out_features": dense, "bias": True}
        _write_json(
            folder / "2_Dense/config.json", values | {"activation_function": "torch.nn.modules.activation.Tanh"}
        )
        tensors = {"linear.weight": torch.randn(dense, 64) * 0.2, "linear.bias": torch.randn(dense)}
        save_file(tensors, folder / "2_Dense/model.safetensors")
        modules.append(("2_Dense", "models.Dense"))
    if normalize:
        modules.append((f"{len(modules)}_Normalize", "models.Normalize"))
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"{_PACKAGE}.{kind}"} for i, (path, kind) in enumerate(modules)
    ]
    _write_json(folder / "modules.json", entries)
    return save_tokenizer(byte_level(), folder)


def make_classifier(folder: Path, name: str = "qwen3", num_labels: int = 3, **config: Any) -> Path:
    """Write a checkpoint with the head of a classifier."""
    kind, overrides = CHECKPOINTS[name]
    values = BASE | overrides | {"vocab_size": VOCAB, "pad_token_id": 0, "num_labels": num_labels}
    torch.manual_seed(2)
    model = AutoModelForSequenceClassification.from_config(kind(**(values | config)), dtype=torch.float32)
    model.save_pretrained(folder)
    return save_tokenizer(byte_level(), folder)


@torch.inference_mode()
def embed(folder: Path, prompt: list[int], adapter: Path | None = None) -> torch.Tensor:
    """Return the embedding of a prompt, [size] float32."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    if adapter is not None:
        is_inner = json.loads((adapter / "adapter_config.json").read_text())["task_type"] == "FEATURE_EXTRACTION"
        with library_warnings_ignored():
            model = PeftModel.from_pretrained(model, adapter).eval() if is_inner else _adapted(model, adapter)
    hidden = model(torch.tensor([prompt])).last_hidden_state[0]
    if not (folder / "modules.json").exists():
        return functional.normalize(hidden[-1], dim=0)
    pooling = json.loads((folder / "1_Pooling/config.json").read_text())
    if pooling.get("pooling_mode_lasttoken"):
        vector = hidden[-1]
    elif pooling.get("pooling_mode_cls_token"):
        vector = hidden[0]
    elif pooling.get("pooling_mode_mean_tokens"):
        vector = hidden.sum(0) / len(prompt)
    else:
        weights = torch.arange(1, len(prompt) + 1).float()[:, None]
        vector = (hidden * weights).sum(0) / weights.sum()
    if (folder / "2_Dense").exists():
        tensors = load_file(folder / "2_Dense/model.safetensors")
        vector = torch.tanh(tensors["linear.weight"] @ vector + tensors["linear.bias"])
    is_normalized = "Normalize" in (folder / "modules.json").read_text()
    return functional.normalize(vector, dim=0) if is_normalized else vector


def make_pooled_adapter(checkpoint: Path, folder: Path, num_labels: int = 0, seed: int = 0) -> Path:
    """Write an adapter that was trained on the inner model, or one with a head of `num_labels` classes."""
    torch.manual_seed(seed)
    if num_labels:
        model = _classifier(checkpoint, num_labels)
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="SEQ_CLS")
    else:
        model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="FEATURE_EXTRACTION")
    return save_random_adapter(model, config, folder)


@torch.inference_mode()
def classify(
    folder: Path, prompt: list[int], adapter: Path | None = None, num_labels: int | None = None
) -> torch.Tensor:
    """Return the scores of a prompt, [num_labels] float32. `num_labels` is that of the adapter's own head."""
    model = _classifier(folder, num_labels)
    if adapter is not None:
        with library_warnings_ignored():
            model = PeftModel.from_pretrained(model, adapter)
    return model.eval()(torch.tensor([prompt])).logits[0]


def _classifier(folder: Path, num_labels: int | None = None) -> Any:
    options = {} if num_labels is None else {"num_labels": num_labels, "ignore_mismatched_sizes": True}
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, **options)
    model.config.pad_token_id = None
    return model


def _adapted(model: Any, adapter: Path) -> Any:
    """Return a model with the A and B of an adapter added to its weights. PEFT names its modules after the model with
    an output projection."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    for name, low in tensors.items():
        if name.endswith("lora_A.weight"):
            path = name.removeprefix("base_model.model.model.").removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")]
            modules[path].weight.data += config["lora_alpha"] / config["r"] * up.float() @ low.float()
    return model


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))
