# SPDX-License-Identifier: Apache-2.0
"""The recorded engine of the simulator's tests: the tiny model with a small KV cache."""

from support.quire_serve import EXAMPLES

from quire_engine.simulation.recording import RecordingInfo
from quire_engine.simulation.step_features import StepFeatures
from quire_engine.simulation.step_model import StepModel
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.engine.config import EngineConfig
from quire_spec.model.model_config import ModelConfig

TINY = EXAMPLES / "models/tiny"
CONFIG = EngineConfig(model=str(TINY), device="cpu", max_model_len=1024, max_num_batched_tokens=256, max_num_seqs=16)
NUM_BLOCKS = 512
BLOCK_BYTES = 2**20
MEMORY = MeasuredMemory(0, 0, NUM_BLOCKS * BLOCK_BYTES, NUM_BLOCKS, CONFIG.block_size, 1024, "float32", "cpu")
INFO = RecordingInfo(CONFIG.to_json(), ModelConfig.load(TINY), MEMORY, 2)


def step_model(constant=0.001, prefill=1e-5, decode=1e-4, kv=0.0, area=0.0):
    """Return a model whose time is known. Adapters and copies do not make a step longer."""
    seconds_per = dict(zip(StepFeatures.names, (constant, prefill, decode, kv, area, 0.0, 0.0, 0.0, 0.0), strict=True))
    return StepModel(INFO, 1000, seconds_per, dict.fromkeys(StepFeatures.names, 2**40))
