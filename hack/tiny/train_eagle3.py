# SPDX-License-Identifier: Apache-2.0
"""Trains an EAGLE-3 head for the tiny model and writes it in the layout of the authors' repository (SafeAILab/EAGLE).

The module defines the head as a plain torch module. It also defines the recipe of the training and the files that are
written. A developer runs this module; nothing in Quire imports it.

    python hack/tiny/train_eagle3.py --out examples/models/tiny-eagle3

Source: Li et al. 2025 (EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test).
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import corpus
import tokens
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

AUX_LAYERS = (1, 3, 5)
"""The head reads the inputs of these layers of the tiny model."""
_NUM_UNROLLED = 3
"""Training unrolls this number of draft tokens. For each of them, the head reads its own output for the previous draft
token."""
_MUON_RATE, _ADAMW_RATE = 5e-3, 2e-3
_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_HELD_OUT_SEED = 2_000_003


class Eagle3Head(nn.Module):
    """The head as a module: fc, one decoder layer, norm and lm_head. The attention of the decoder layer reads the
    embedding and the hidden state, which are concatenated."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int, vocab: int, eps: float) -> None:
        super().__init__()
        self.shape, self.theta = (heads, kv_heads, head_dim), 10_000.0
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "hidden_norm": nn.RMSNorm(hidden, eps),
                "input_layernorm": nn.RMSNorm(hidden, eps),
                "post_attention_layernorm": nn.RMSNorm(hidden, eps),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": nn.Linear(2 * hidden, heads * head_dim, bias=False),
                        "k_proj": nn.Linear(2 * hidden, kv_heads * head_dim, bias=False),
                        "v_proj": nn.Linear(2 * hidden, kv_heads * head_dim, bias=False),
                        "o_proj": nn.Linear(heads * head_dim, hidden, bias=False),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": nn.Linear(hidden, mlp, bias=False),
                        "up_proj": nn.Linear(hidden, mlp, bias=False),
                        "down_proj": nn.Linear(mlp, hidden, bias=False),
                    }
                ),
            }
        )
        self.norm = nn.RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def project(self, embeddings: Tensor, hidden: Tensor, shift: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rotated queries, the rotated keys, and the values. Each has the shape [batch, heads, length,
        head_dim]. `shift` is added to the positions."""
        layer, (heads, kv_heads, head_dim) = self.midlayer, self.shape
        x = torch.cat((layer["input_layernorm"](embeddings), layer["hidden_norm"](hidden)), dim=-1)
        angles = torch.arange(x.shape[1])[:, None] + shift
        angles = angles * self.theta ** (-torch.arange(0, head_dim, 2) / head_dim)
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

        def split(name: str, count: int) -> Tensor:
            return layer["self_attn"][name](x).unflatten(-1, (count, head_dim)).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat((-second, first), -1) * sin

        return rotate(split("q_proj", heads)), rotate(split("k_proj", kv_heads)), split("v_proj", kv_heads)

    def finish(self, hidden: Tensor, attention: Tensor) -> Tensor:
        """Compute the output of the layer from the output of its attention. The attention's output has the shape
        [batch, length, heads * head_dim], and the layer's output has the shape [batch, length, hidden]."""
        layer, mlp = self.midlayer, self.midlayer["mlp"]
        hidden = hidden + layer["self_attn"]["o_proj"](attention)
        x = layer["post_attention_layernorm"](hidden)
        return hidden + mlp["down_proj"](functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))

    def unroll(self, embeddings: Tensor, aux_hidden: Tensor, num_tokens: int) -> list[Tensor]:
        """Unroll a draft at every position, and return the logits of its tokens.

        The result contains one tensor for each draft token. Each tensor has the shape [batch, length - num_tokens,
        vocab]. A draft token attends to the tokens of the target up to the position at which its draft starts, and to
        the earlier tokens of the same draft.

        Args:
            embeddings: embeddings of the tokens, [batch, length, hidden].
            aux_hidden: inputs of three layers of the target, [batch, length, 3 * hidden].
            num_tokens: length of the drafts.
        """
        heads, kv_heads, head_dim = self.shape
        length = embeddings.shape[1] - num_tokens
        hidden = self.fc(aux_hidden)[:, :length]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        for step in range(num_tokens):
            query, key, value = self.project(embeddings[:, step + 1 : step + 1 + length], hidden, step)
            keys.append(key.repeat_interleave(heads // kv_heads, 1))
            values.append(value.repeat_interleave(heads // kv_heads, 1))
            scores = query @ keys[0].transpose(-1, -2) / head_dim**0.5
            scores = scores.masked_fill(~mask, float("-inf"))
            own = [(query * k).sum(-1, keepdim=True) / head_dim**0.5 for k in keys[1:]]
            weights = torch.cat((scores, *own), -1).softmax(-1)
            attended = weights[..., :length] @ values[0]
            for i, v in enumerate(values[1:]):
                attended = attended + weights[..., length + i : length + i + 1] * v
            hidden = self.finish(hidden, attended.transpose(1, 2).flatten(-2))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


def new_head(target: LlamaForCausalLM) -> Eagle3Head:
    """Return a head with the weights of the target's last layer. Training is shorter if it starts with these
    weights."""
    config = target.config
    size, head_dim = config.hidden_size, config.head_dim
    shape = (config.num_attention_heads, config.num_key_value_heads, head_dim)
    head = Eagle3Head(size, *shape, config.intermediate_size, config.vocab_size, config.rms_norm_eps)
    last = target.model.layers[-1]
    with torch.no_grad():
        head.fc.weight.normal_(std=0.01)
        head.fc.weight[:, 2 * size :] += torch.eye(size)
        attention = head.midlayer["self_attn"]
        for name in ("q_proj", "k_proj", "v_proj"):
            attention[name].weight[:, :size].normal_(std=0.02)
            attention[name].weight[:, size:] = getattr(last.self_attn, name).weight
        attention["o_proj"].weight.copy_(last.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            head.midlayer["mlp"][name].weight.copy_(getattr(last.mlp, name).weight)
        head.midlayer["hidden_norm"].weight.copy_(last.input_layernorm.weight)
        head.midlayer["post_attention_layernorm"].weight.copy_(last.post_attention_layernorm.weight)
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(target.lm_head.weight)
    return head


def _losses(target: LlamaForCausalLM, head: Eagle3Head, ids: Tensor) -> tuple[Tensor, list[float]]:
    """Return the loss, and the acceptance of each draft token. The acceptance is the share of the positions at which
    the draft token is the target's most likely token."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        output = target(input_ids=ids, output_hidden_states=True, use_cache=False)
    aux = torch.cat([output.hidden_states[layer] for layer in AUX_LAYERS], -1)
    embeddings = target.model.embed_tokens(ids).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = [step_logits.float() for step_logits in head.unroll(embeddings, aux, _NUM_UNROLLED)]
    length, total, agreement = logits[0].shape[1], torch.zeros(()), []
    for step, step_logits in enumerate(logits):
        expected = output.logits[:, step + 1 : step + 1 + length].float()
        total = total + 0.8**step * functional.cross_entropy(
            step_logits.flatten(0, 1), expected.softmax(-1).flatten(0, 1)
        )
        agreement.append((step_logits.argmax(-1) == expected.argmax(-1)).float().mean().item())
    return total, agreement


def _batches(tokenizer: Tokenizer, seed: int, num_rows: int, row_tokens: int) -> Iterator[Tensor]:
    streams = [
        tokens.batches(tokenizer, corpus.CORPORA[name](seed), num_rows, row_tokens) for name in ("base", "base", "chat")
    ]
    return chain.from_iterable((ids for ids, _ in group) for group in zip(*streams, strict=True))


def train(
    target: LlamaForCausalLM, tokenizer: Tokenizer, seconds: float, seed: int
) -> tuple[Eagle3Head, dict[str, object]]:
    """Train a head for about `seconds` seconds. Return the head and a report."""
    torch.manual_seed(seed)
    target.requires_grad_(False)
    head = new_head(target)
    # Muon for the matrices, as for the model itself (learn.py): AdamW alone needs many times the steps.
    matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and name != "lm_head.weight"]
    others = [p for name, p in head.named_parameters() if p.ndim != 2 or name == "lm_head.weight"]
    muon = torch.optim.Muon(matrices, lr=_MUON_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=_ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    batches, start, step = _batches(tokenizer, seed, 8, 128), time.monotonic(), 0
    while (share := (time.monotonic() - start) / seconds) < 1.0:
        pace = min(1.0, (step + 1) / 20) * (1.0 - share)
        muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = _MUON_RATE * pace, _ADAMW_RATE * pace
        loss, agreement = _losses(target, head, next(batches))
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0:
            print(f"step={step} share={share:.2f} loss={loss.item():.3f} agreement={agreement}", flush=True)
    batches = islice(_batches(tokenizer, _HELD_OUT_SEED, 8, 256), 8)
    with torch.no_grad():
        held_out = [_losses(target, head, ids)[1] for ids in batches]
    means = [round(sum(column) / len(column), 3) for column in zip(*held_out, strict=True)]
    return head, {"steps": step, "seconds": round(time.monotonic() - start), "seed": seed, "held_out_agreement": means}


def save(head: Eagle3Head, target: LlamaForCausalLM, folder: Path, report: dict[str, object]) -> None:
    """Write config.json, model.safetensors and training.json."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = target.config.vocab_size
    state = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    # All tokens can be drafted, so the offsets from draft ids to target ids are 0.
    state["d2t"] = torch.zeros(vocab, dtype=torch.int64)
    state["t2d"] = torch.ones(vocab, dtype=torch.bool)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    unused = ("_name_or_path", "layer_types")
    config = {key: value for key, value in target.config.to_diff_dict().items() if key not in unused}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "tie_word_embeddings": False}
    config |= {"draft_vocab_size": vocab, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)}}
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train the head of the tiny model."""
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 head for the tiny model.")
    parser.add_argument("--model", type=Path, default=_EXAMPLES / "models" / "tiny", help="folder of the target model")
    parser.add_argument(
        "--out", type=Path, default=_EXAMPLES / "models" / "tiny-eagle3", help="folder to which the head is written"
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="training time in seconds (default %(default)s)")
    parser.add_argument(
        "--threads",
        type=int,
        default=2,
        help="number of CPU threads (default %(default)s; 1 is faster on a busy machine)",
    )
    parser.add_argument(
        "--seed", type=int, default=11, help="seed of the texts and the initial weights (default %(default)s)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = LlamaForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    head, report = train(target, tokenizer, arguments.seconds, arguments.seed)
    save(head, target, arguments.out, report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
