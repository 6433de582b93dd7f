# SPDX-License-Identifier: Apache-2.0
"""Layers of tiny checkpoints that predict a further token, computed by the modules of transformers."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import load_oracle, make_checkpoint
from torch.nn import functional
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpLayer

QWEN_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
    "mtp_block": "layers.0",
}
DEEPSEEK_NAMES = {"post_norm": "shared_head.norm", "mtp_block": ""}


class MTPReference:
    """A model of transformers with an MTP layer."""

    def __init__(self, folder: Path, name: str) -> None:
        """Write checkpoint `name` of tiny_checkpoints and a random layer into `folder`; `save` writes its weights."""
        self.folder = make_checkpoint(folder, name)
        self.oracle = load_oracle(folder)
        inner = self.oracle.get_decoder()
        config = copy.deepcopy(inner.config)
        index = max(i for i, layer in enumerate(inner.layers) if hasattr(layer, "self_attn"))
        layer = inner.layers[index]
        norm = type(layer.input_layernorm)
        torch.manual_seed(1)
        self.head = MtpLayer(config, type(layer), norm, index).float()
        for parameter in self.head.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.02 if parameter.dim() > 1 else 0.3)
        is_qwen = name.startswith("qwen")
        self._names = QWEN_NAMES if is_qwen else DEEPSEEK_NAMES
        self._path = "mtp" if is_qwen else f"model.layers.{len(inner.layers)}"
        settings = json.loads((folder / "config.json").read_text())
        text = settings.get("text_config", settings)
        text["mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(settings))

    def save(self) -> None:
        """Add the weights of the layer to the checkpoint."""
        file, named = self.folder / "model.safetensors", {}
        for name, tensor in self.head.state_dict().items():
            part, _, rest = name.partition(".")
            path = ".".join(each for each in (self._path, self._names.get(part, part), rest) if each)
            named[path] = tensor.contiguous()
        save_file(load_file(file) | named, file, {"format": "pt"})

    def train(self, sequences: list[list[int]], num_steps: int) -> None:
        """Make the layer predict the tokens of these sequences, which have equal lengths."""
        tokens = torch.tensor(sequences)
        with torch.no_grad():
            hidden = self._hidden(tokens)[:, :-2]
        optimizer = torch.optim.Adam(self.head.parameters(), 1e-2)
        for _ in range(num_steps):
            logits = self.oracle.lm_head(self._run(tokens[:, 1:-1], hidden))
            optimizer.zero_grad()
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten()).backward()
            optimizer.step()

    @torch.inference_mode()
    def draft(self, tokens: list[int], num_tokens: int) -> list[int]:
        """Return the draft after `tokens`. All positions are computed again for each token of the draft."""
        ids = torch.tensor([tokens])
        hidden, ids = self._hidden(ids[:, :-1]), ids[:, 1:]
        for _ in range(num_tokens):
            out = self._run(ids, hidden)[:, -1:]
            token = self.oracle.lm_head(out).argmax(-1)
            hidden, ids = torch.cat((hidden, out), dim=1), torch.cat((ids, token), dim=1)
        return ids[0, len(tokens) - 1 :].tolist()

    def _hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return self.oracle.get_decoder()(ids).last_hidden_state

    def _run(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.oracle.get_decoder()
        embeddings, positions = inner.embed_tokens(ids), torch.arange(ids.shape[1])[None]
        mask = create_causal_mask(
            config=inner.config, inputs_embeds=embeddings, attention_mask=None, cache=None, position_ids=positions
        )
        return self.head(embeddings, hidden, inner.rotary_emb(embeddings, positions), mask, positions, None)
