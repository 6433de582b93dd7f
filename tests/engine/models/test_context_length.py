# SPDX-License-Identifier: Apache-2.0
"""Rope scaling extends the context beyond max_position_embeddings; outputs equal those of transformers."""

from pathlib import Path
from typing import Any

import pytest
from support.tiny_checkpoints import BASE, greedy_output, write_checkpoint
from transformers import LlamaConfig

from quire_engine import LLM, SamplingParams
from quire_spec.errors import ConfigError

PROMPT = [(7 * i + 3) % 320 for i in range(150)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def _checkpoint(folder: Path, rope: dict[str, Any]) -> Path:
    config = LlamaConfig(**(BASE | {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4} | rope}))
    return write_checkpoint(folder, config, 0)


def _load(folder: Path, **fields: Any) -> LLM:
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 2**22, "skip_tokenizer_init": True}
    return LLM(folder, **(settings | fields))


@pytest.mark.parametrize("rope", [YARN, {"rope_type": "linear", "factor": 4.0}], ids=["yarn", "linear"])
def test_extended_context_equals_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, rope)
    llm = _load(folder, max_num_batched_tokens=64, max_num_seqs=4)
    assert llm.engine.max_model_len == 256
    params = SamplingParams(temperature=0.0, max_tokens=60)
    for prompt in (PROMPT, PROMPT[:20]):
        [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        assert output.outputs[0].token_ids == greedy_output(folder, prompt, 60)
    with pytest.raises(ConfigError, match=r"max_model_len: 257 exceeds the model's limit 256 \(.* and rope_scaling\)"):
        _load(folder, max_model_len=257)


@pytest.mark.parametrize(
    ("rope", "error"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, r"limit 64 \(.*rope type dynamic does not extend it"),
        ({"rope_type": "default"}, r"limit 64 \(max_position_embeddings\)"),
    ],
    ids=["dynamic", "default"],
)
def test_other_rope_types_do_not_extend_the_context(rope: dict[str, Any], error: str, tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path, rope)
    assert _load(folder).engine.max_model_len == 64
    with pytest.raises(ConfigError, match=error):
        _load(folder, max_model_len=65)
