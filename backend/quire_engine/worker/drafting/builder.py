# SPDX-License-Identifier: Apache-2.0
"""Builds the drafter that `speculative_config` describes."""

from dataclasses import replace
from pathlib import Path
from typing import cast

from quire_engine.models.base import CausalLM
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.llama import LlamaForCausalLM
from quire_engine.weights.hub import resolve_model
from quire_engine.worker.device import resolve_cache_dtype
from quire_engine.worker.drafting.chain_drafter import ChainDrafter
from quire_engine.worker.drafting.draft_model import DraftModel, Eagle3DraftModel, MTPDraftModel, SmallDraftModel
from quire_engine.worker.drafting.drafter import Drafter
from quire_engine.worker.drafting.medusa_drafter import MedusaDrafter
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import ConfigError


def build_drafter(
    config: EngineConfig, target: CausalLM, target_folder: Path, factory: ParamFactory, progress: bool
) -> Drafter | None:
    """Return a drafter, or None if the method does not need one, or if the rank is not 0.

    The weights of the drafter are allocated, but not loaded. Only rank 0 has a drafter, and it is not split between
    ranks. This works because a drafter is small, every rank has the hidden states, and only rank 0 has the tokens of a
    step.

    Raises:
        ConfigError: the weights cannot be found or do not fit the model; the message names the key of
            `speculative_config`.
    """
    speculative = config.speculative_config
    if speculative is None or not speculative.has_drafter:
        return None
    if factory.communicator is not None and factory.communicator.shard.rank > 0:
        return None
    speculative.check_target(target.shape)
    if speculative.model is None:
        model = MTPDraftModel(target, target_folder, replace(factory, communicator=None))
        return ChainDrafter(model, resolve_cache_dtype(config, factory.dtype), factory.device, config.block_size)
    try:
        folder = resolve_model(speculative.model, speculative.revision, progress, config.download_dir)
        return _build(
            config, speculative, folder, target, target_folder, replace(factory, quantization=None, communicator=None)
        )
    except ConfigError as error:
        message = str(error)
        if message.startswith("speculative_config"):
            raise
        raise ConfigError(f"speculative_config.model: {message.removeprefix('model: ')}") from error


def _build(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    folder: Path,
    target: CausalLM,
    target_folder: Path,
    factory: ParamFactory,
) -> Drafter:
    if speculative.method == "medusa":
        # Layer index num_layers stands for the output of the last layer.
        target.aux_hidden_state_layers = (target.shape.num_layers,)
        normalize = cast(LlamaForCausalLM, target).norm
        return MedusaDrafter(folder, target.shape, speculative.num_speculative_tokens, factory, normalize)
    model: DraftModel
    if speculative.method == "eagle3":
        model = Eagle3DraftModel(folder, target, target_folder, factory)
    else:
        model = SmallDraftModel(folder, target.shape, target_folder, factory)
    return ChainDrafter(model, resolve_cache_dtype(config, factory.dtype), factory.device, config.block_size)
