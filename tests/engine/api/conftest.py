# SPDX-License-Identifier: Apache-2.0
"""A model with two adapters for tests of the offline API, and its outputs in transformers and peft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_checkpoints import VOCAB, load_adapted_oracle, load_oracle, make_adapter, make_checkpoint
from support.tokenizer import byte_level, save_tokenizer

from quire_engine import LLM, LoRARequest, SamplingParams


class Models:
    """A checkpoint with a tokenizer and two adapters, and reference models of transformers and peft."""

    def __init__(self, folder: Path) -> None:
        self.model = make_checkpoint(folder / "model", "llama")
        save_tokenizer(byte_level(VOCAB - 1), self.model)
        self.paths = {name: make_adapter(self.model, folder / name, seed=i) for i, name in enumerate("ab", 1)}
        self.loras = {name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(self.paths.items(), 1)}
        self.references = {None: load_oracle(self.model)}
        self.references |= {name: load_adapted_oracle(self.model, path) for name, path in self.paths.items()}
        self.llm = self.load()

    def load(self, **fields: Any) -> LLM:
        """Return an LLM with small settings."""
        settings = {"dtype": "float32", "enable_lora": True, "max_model_len": 128, "kv_cache_memory_bytes": 2**22}
        return LLM(model=self.model, **(settings | fields))

    def lora(self, name: str | None) -> LoRARequest | None:
        return None if name is None else self.loras[name]

    def expected(self, token_ids: list[int], name: str | None = None, **arguments: Any) -> list[int]:
        """Return the tokens that transformers generates, with `arguments` of its `generate`."""
        ids = torch.tensor([token_ids])
        settings = {"max_new_tokens": 24, "do_sample": False} | arguments
        with torch.inference_mode():
            out = self.references[name].generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        return out[0, len(token_ids) :].tolist()

    def tokens(self, prompts: list[Any], *params: SamplingParams, **fields: Any) -> list[list[int]]:
        llm = self.load(**fields) if fields else self.llm
        sampling_params = list(params) if len(params) > 1 else params[0]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, sampling_params, use_tqdm=False)]


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))
