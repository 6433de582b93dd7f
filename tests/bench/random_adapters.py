# SPDX-License-Identifier: Apache-2.0
"""Random LoRA adapters on every linear of a checkpoint, in PEFT's format, written without building the model.

Their deltas are small compared with the base, as those of trained adapters are, but large enough to change the output.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ALPHA = 2
"""A multiple of the rank: the scale of B A."""


def make_adapters(
    checkpoint: Path, folder: Path, count: int, rank: int, device: str = "cpu", *, use_dora: bool = False
) -> list[Path]:
    """Write `count` adapters of LoRA rank `rank` for a Llama checkpoint to folders under `folder`; existing ones are
    reused. `device` generates the numbers, which takes a CPU a second for a large model. With `use_dora`, they have
    magnitudes."""
    config = json.loads((checkpoint / "config.json").read_text())
    norms = _row_norms(checkpoint) if use_dora else {}
    name = f"{'dora-' if use_dora else ''}rank{rank}"
    return [_make_adapter(config, folder / f"{name}-{seed}", rank, seed, device, norms) for seed in range(count)]


def num_bytes(shape: dict[str, Any], rank: int) -> int:
    """Of the tensors of one."""
    return 2 * rank * shape["num_hidden_layers"] * sum(sum(sizes) for sizes in linear_shapes(shape).values())


def evict_from_page_cache(folders: Iterable[Path]) -> str:
    """Drop the files from the page cache, so that they are read from the disk again. Return where they are afterwards:
    "disk"; "memory" if some pages remained; "unknown" if the file system does not report it."""
    storage = "disk"
    for folder in folders:
        with (folder / "adapter_model.safetensors").open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                # Only gets what needs no wait for a disk.
                os.preadv(file.fileno(), [bytearray(1)], os.fstat(file.fileno()).st_size - 1, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            except OSError:
                return "unknown"
            storage = "memory"
    return storage


def _row_norms(checkpoint: Path) -> dict[str, Any]:
    """Return the norms of the rows of all matrices, by the names of their modules."""
    from safetensors.torch import load_file

    files = (load_file(path) for path in sorted(checkpoint.glob("*.safetensors")))
    matrices = {name: tensor for tensors in files for name, tensor in tensors.items() if tensor.dim() == 2}
    return {name.removesuffix(".weight"): tensor.float().norm(dim=1) for name, tensor in matrices.items()}


def _make_adapter(
    shape: dict[str, Any], folder: Path, rank: int, seed: int, device: str, norms: dict[str, Any]
) -> Path:
    import torch
    from safetensors.torch import save_file

    if (folder / "adapter_config.json").exists():  # the last file that is written
        return folder
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for path, (d_in, d_out) in linear_shapes(shape).items():
            name = f"base_model.model.model.layers.{layer}.{path}"
            for matrix, size in (("A", (rank, d_in)), ("B", (d_out, rank))):
                spread = size[1] ** -0.5 / (1 if matrix == "A" else 4)
                values = torch.randn(size, generator=generator, device=device) * spread
                tensors[f"{name}.lora_{matrix}.weight"] = values.to(torch.bfloat16).cpu()
            if norms:
                spread = 1 + torch.randn(d_out, generator=generator, device=device).cpu() / 20
                tensors[f"{name}.lora_magnitude_vector"] = norms[f"model.layers.{layer}.{path}"] * spread
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({path.rpartition(".")[2] for path in linear_shapes(shape)})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": ALPHA * rank, "bias": "none"}
    config |= {"use_dora": bool(norms)}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets}))
    return folder


def linear_shapes(shape: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every linear of a layer, by its path there."""
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    attention = {"q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden)}
    mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return {f"self_attn.{n}": s for n, s in attention.items()} | {f"mlp.{n}": s for n, s in mlp.items()}
