# SPDX-License-Identifier: Apache-2.0
"""Models that propose drafts.

A draft model is a small language model with the same vocabulary as the target, an EAGLE-3 head, or a layer of the
target's checkpoint that predicts a further token (MTP). A draft model owns its weights, and each call computes one
pass. The drafter decides which tokens are in the pass.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.base import CausalLM
from quire_engine.models.eagle3 import EMBEDDING, Eagle3Head
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.vocab_parallel import build_lm_head
from quire_engine.models.llama import LlamaForCausalLM
from quire_engine.models.mtp import MTPHead
from quire_engine.models.registry import get_model_class
from quire_engine.weights.loader import equals_checkpoint, load_weights, read_tensor, read_tensors
from quire_engine.weights.param_shard import LoadTarget, unsharded
from quire_engine.weights.quantized.quantized_tensors import QuantizedTensors
from quire_engine.weights.tensor_files import TensorFiles
from quire_kernels import HugePageArena, embedding
from quire_spec.engine.speculative_config import draft_model_problem
from quire_spec.errors import ConfigError
from quire_spec.model.eagle3_config import Eagle3Config
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.mtp_config import MTPConfig
from quire_spec.model.quantization import resolve_quantization


class DraftModel(ABC):
    """For each row that needs logits, proposes the token that follows this row."""

    shape: ModelConfig
    """Configuration of the draft model. It determines the shape of the draft model's KV cache."""
    num_bytes: int
    """Bytes of its parameters."""
    reads_hidden_states: bool
    """True if a row reads the hidden states at its position and the token at the next position. False if a row reads
    only the token at its position."""

    @abstractmethod
    def load(self) -> None:
        """Fill the parameters."""

    def convert(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Return what the first pass reads, from the hidden states of the target that it keeps; one row for each token
        of the batch."""
        return hidden

    @abstractmethod
    def __call__(self, batch: ForwardBatch, kv_cache: KVCache, hidden: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Compute a pass, and write its keys and values to `kv_cache`.

        Args:
            batch: the tokens that the model reads, one for each row.
            kv_cache: KV cache of this draft model.
            hidden: the hidden states that the model reads, one for each row. In the first pass of a draft, they are
                those that `convert` returned. In later passes, they are those that this method returned. None if the
                model does not read hidden states.

        Returns:
            The hidden states of the rows that need logits, and the token that the model proposes after each of these
            rows, [num_logits] int64. At least one row must need logits.
        """

    @abstractmethod
    def fill_cache(self, batch: ForwardBatch, kv_cache: KVCache, hidden: Tensor | None) -> None:
        """Compute a pass that only writes keys and values to the KV cache. No row of this pass needs logits."""


class SmallDraftModel(DraftModel):
    """A language model of any supported architecture. Adapters of the target model do not change this model."""

    reads_hidden_states = False

    def __init__(self, folder: Path, target: ModelConfig, target_folder: Path, factory: ParamFactory) -> None:
        """Allocate the model in `folder`; raises ConfigError if its vocabulary differs from the target's."""
        self.shape = ModelConfig.load(folder, "quire")
        _check_vocabularies(self.shape, folder, target, target_folder)
        self._folder = folder
        scheme = self.shape.quantization
        self._checkpoint = None if scheme is None else QuantizedTensors(TensorFiles(folder), scheme)
        quantization = resolve_quantization(None, scheme)
        own_factory = replace(factory, quantization=quantization, checkpoint=self._checkpoint)
        self._model: CausalLM = get_model_class(self.shape.architecture)(self.shape, own_factory)
        self.num_bytes = self._model.num_bytes

    def load(self) -> None:
        """See DraftModel."""
        self._model.load(self._folder, self._checkpoint)
        self._model.pack()

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache, hidden: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """See DraftModel."""
        rows = self._model(batch, kv_cache)
        assert rows is not None
        return None, self._model.compute_logits(rows, batch).argmax(dim=-1)

    def fill_cache(self, batch: ForwardBatch, kv_cache: KVCache, hidden: Tensor | None) -> None:
        """See DraftModel."""
        self._model(batch, kv_cache)


class Eagle3DraftModel(DraftModel):
    """An EAGLE-3 head. It reads the hidden states of the target and the embeddings of tokens."""

    reads_hidden_states = True

    def __init__(self, folder: Path, target: CausalLM, target_folder: Path, factory: ParamFactory) -> None:
        """Allocate the head in `folder`; raises ConfigError if it does not fit `target`."""
        config = Eagle3Config.load(folder, target.shape)
        self.shape = config.layer
        self._folder, self._target = folder, target
        self._head = Eagle3Head(config, target.shape.hidden_size, factory)
        self._embedding_source = self._find_embedding(target_folder)
        self._embedding: Tensor | None = None
        """The embedding that the head has loaded. None if the head reads the embedding of the target."""
        if self._embedding_source is not None:
            self._embedding = factory.empty(target.shape.vocab_size, target.shape.embedding_size)
        self.num_bytes = self._head.num_bytes + (0 if self._embedding is None else self._embedding.nbytes)
        target.aux_hidden_state_layers = config.aux_layers

    def _find_embedding(self, target_folder: Path) -> tuple[Path, str] | None:
        """Return the folder and the name of the embedding that must be loaded.

        Return None if the head can use the target's embedding, and this rank has the whole embedding.

        Raises:
            ConfigError: the embedding of the head does not have the shape of the target's embedding.
        """
        shape = self._target.shape
        target_name = next(name for name, _ in self._target.tensors() if name.endswith(EMBEDDING))
        for name in TensorFiles(self._folder).file_by_tensor:
            if name.removeprefix("model.") == EMBEDDING:
                own = read_tensor(self._folder, name)
                if own.shape != (shape.vocab_size, shape.embedding_size):
                    raise ConfigError(
                        f"speculative_config.model: {name} has shape {tuple(own.shape)}; the model implies "
                        f"{(shape.vocab_size, shape.embedding_size)}"
                    )
                # In most checkpoints of a head, this embedding is a copy of the target's embedding.
                if not equals_checkpoint(target_folder, target_name, own):
                    return self._folder, name
        return None if self._target.communicator is None else (target_folder, target_name)

    def load(self) -> None:
        """See DraftModel."""
        self._head.load(read_tensors(self._folder), self._target.shape.vocab_size)
        if self._embedding is not None:
            assert self._embedding_source is not None
            self._embedding.copy_(read_tensor(*self._embedding_source))

    def convert(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See DraftModel."""
        return self._head.combine(hidden, batch)

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache, hidden: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """See DraftModel."""
        output = self._forward(batch, kv_cache, hidden)
        rows = output if batch.logit_rows is None else output[batch.logit_rows]
        return rows, self._head.propose(rows, batch)

    def fill_cache(self, batch: ForwardBatch, kv_cache: KVCache, hidden: Tensor | None) -> None:
        """See DraftModel."""
        self._forward(batch, kv_cache, hidden)

    def _forward(self, batch: ForwardBatch, kv_cache: KVCache, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        embeddings = embedding(
            batch.token_ids, self._target.embed_tokens if self._embedding is None else self._embedding
        )
        return self._head(embeddings, hidden, batch, kv_cache.layers[0])


class MTPDraftModel(DraftModel):
    """The layer of the target's checkpoint that predicts a further token. It reads the last hidden states of the target
    and the embeddings of tokens."""

    reads_hidden_states = True

    def __init__(self, target: CausalLM, folder: Path, factory: ParamFactory) -> None:
        """Allocate the layer. `folder` is that of the target."""
        whole = target.shape if target.communicator is None else target.communicator.shard.model_config
        config = MTPConfig.from_model(whole)
        assert config is not None
        self._folder, self._target, self.shape = folder, target, config.layer
        scheme = whole.quantization
        self._checkpoint = None if scheme is None else QuantizedTensors(TensorFiles(folder), scheme)
        factory = replace(factory, checkpoint=self._checkpoint)
        self._head = MTPHead(config, cast(LlamaForCausalLM, target).LAYER, factory)
        self._embedding: Tensor | None = None
        """The embedding of this head. None if it reads the embedding of the target."""
        self._lm_head = target.lm_head
        if target.communicator is not None:
            # This rank has only a part of the target's embedding and output projection.
            self._embedding = factory.empty(whole.vocab_size, whole.embedding_size)
            tied = self._embedding if whole.tie_word_embeddings else None
            self._lm_head = build_lm_head(whole, factory, tied)
        self.num_bytes = sum(unsharded(tensor).nbytes for _, tensor in self._tensors())
        self.num_bytes += self._head.unread_bytes
        target.aux_hidden_state_layers = (target.shape.num_layers,)

    def load(self) -> None:
        """See DraftModel."""
        load_weights(self._folder, self._tensors(), checkpoint=self._checkpoint, is_part=True)
        arena = HugePageArena()
        self._head.pack(arena)
        if self._embedding is not None:
            self._lm_head.pack(arena)

    def _tensors(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the name of each tensor in the checkpoint, and the parameter that it fills."""
        yield from self._head.tensors("")
        if self._embedding is not None:
            yield next(name for name, _ in self._target.tensors()), self._embedding
            if not self._target.shape.tie_word_embeddings:
                yield from self._lm_head.tensors("")

    def convert(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See DraftModel."""
        return self._target.final_norm(hidden, batch)

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache, hidden: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """See DraftModel."""
        output = self._forward(batch, kv_cache, hidden)
        rows = output if batch.logit_rows is None else output[batch.logit_rows]
        return rows, self._lm_head(rows, batch).argmax(dim=-1)

    def fill_cache(self, batch: ForwardBatch, kv_cache: KVCache, hidden: Tensor | None) -> None:
        """See DraftModel."""
        self._forward(batch, kv_cache, hidden)

    def _forward(self, batch: ForwardBatch, kv_cache: KVCache, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        embeddings = embedding(
            batch.token_ids, self._target.embed_tokens if self._embedding is None else self._embedding
        )
        return self._head(embeddings, hidden, batch, kv_cache.layers[0])


def _check_vocabularies(draft: ModelConfig, folder: Path, target: ModelConfig, target_folder: Path) -> None:
    """Raise ConfigError if `draft` cannot be the draft model of `target`, or if their vocabularies differ."""
    if problem := draft_model_problem(draft, target):
        raise ConfigError(f"speculative_config.model: {problem}")
    vocabularies = [_read_vocabulary(path / "tokenizer.json") for path in (folder, target_folder)]
    if None not in vocabularies and vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            "speculative_config.model: the tokens in tokenizer.json of the draft model differ from those of the model; "
            "use a draft model with the same vocabulary"
        )


def _read_vocabulary(path: Path) -> object:
    """Return the vocabulary in a tokenizer.json, or None if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
