# SPDX-License-Identifier: Apache-2.0
"""Models that a class of transformers computes, with Quire's attention, linear layers and adapters.

transformers reads the checkpoint and computes norms, activations, positions and experts. Its linear layers, its
embedding and its attention function are replaced, so that the KV cache, batches of several adapters and quantized
weights work as in other models.

Source of the idea: the Transformers modeling backend of vLLM, model_executor/models/transformers.
"""

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.base import CausalLM
from quire_engine.models.forward_batch import ForwardBatch, build_forward_batch
from quire_engine.models.layers.linear import Linear, ParamFactory
from quire_engine.models.layers.module import Module
from quire_engine.models.transformers.fusions import fuse
from quire_engine.models.transformers.modules import EmbeddingModule, IdentityModel, LinearModule, MergedLinear
from quire_engine.models.transformers.paged_attention import CURRENT_PASS, NAME, CausalMask, Pass
from quire_engine.sequence import BlockId
from quire_engine.sequence import Sequence as TokenSequence
from quire_engine.step.input import build_step_input
from quire_engine.step.plan import ScheduledSpan
from quire_engine.weights.loader import summarize_names
from quire_engine.weights.param_shard import LoadTarget
from quire_engine.weights.quantized.quantized_tensors import QuantizedTensors
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError
from quire_spec.model.architectures import module_name
from quire_spec.model.memory_sizing import layer_linear_sizes
from quire_spec.model.model_config import ModelConfig

logger = logging.getLogger(__name__)

_MERGED_LINEARS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers with the same parent that have the same input."""
_MAX_ERROR = {torch.float32: 1e-3}
"""Largest distance from the logits of transformers, relative to their deviation from their mean, by dtype."""
_MAX_ERROR_IN_HALF = 0.2
"""The same in 16 bits, where rounding can also change which experts are chosen."""
_CHECKED_CHUNKS = ((17, 0), (9, 5), (1, 7), (6, 1))
"""Numbers of tokens of two sequences in the steps of the check."""
_CHECKED_LENGTHS = tuple(map(sum, zip(*_CHECKED_CHUNKS, strict=True)))


class TransformersLayer(Module):
    """The linear layers of a decoder layer that adapters can change."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        sizes = layer_linear_sizes(shape, index)
        self.linears: dict[tuple[str, ...], Linear] = {}
        """Merged linear layers by the paths of their parts."""
        for paths in _merge(sizes):
            linear = Linear(sizes[paths[0]][0], {module_name(path): sizes[path][1] for path in paths}, factory)
            self.linears[paths] = linear
            setattr(self, paths[0], linear)  # Module finds the layers among its attributes


class TransformersForCausalLM(CausalLM):
    """Computes logits from token ids with a class of transformers."""

    layers: Sequence[TransformersLayer]

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        """Describe the linear layers. Their weights are allocated when transformers loads them."""
        self._factory = factory
        super().__init__(shape, replace(factory, device=torch.device("meta")))
        logger.warning(
            "model_impl transformers computes this model architecture=%s; it is slower than a class of Quire",
            shape.architecture,
        )

    def build_layers(self, factory: ParamFactory) -> None:
        """See CausalLM.build_layers."""
        self.layers = [TransformersLayer(self.shape, index, factory) for index in range(self.shape.num_layers)]

    def load(
        self, folder: Path, checkpoint: QuantizedTensors | None = None, *, progress: bool = False, stream: bool = False
    ) -> None:
        """Load the checkpoint with transformers, replace its modules, and compare the result with that of transformers.

        Raises:
            ConfigError: the checkpoint does not fit the class, or the class cannot be served.
        """
        model = _from_pretrained(self.shape, folder, self._factory.dtype).to(self._factory.device)
        generator = random.Random(0)
        prompts = [[generator.randrange(self.shape.vocab_size) for _ in range(n)] for n in _CHECKED_LENGTHS]
        with torch.inference_mode():
            expected = [_reference_logits(model, prompt, self._factory.device) for prompt in prompts]
            try:
                self._replace_modules(model)
            except (AttributeError, TypeError, RuntimeError, NotImplementedError) as error:
                raise self._error(f"its modules cannot be replaced: {error}") from error
            self.num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
            self.num_bytes += self._num_packed_bytes() + self.embed_tokens.nbytes
            self._check(prompts, expected)

    def forward_layers(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """See CausalLM.forward_layers."""
        with _computing(Pass.of_layers(self.shape, batch, kv_cache)):
            outputs = self._base(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, return_dict=True
            )
        hidden: Tensor = outputs.last_hidden_state[0]
        return hidden

    def final_norm(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See CausalLM.final_norm. The layers of transformers contain the norm."""
        return hidden

    def compute_logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See CausalLM.compute_logits."""
        with _computing(Pass(self.shape, batch)):
            logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
        return logits

    def tensors(self) -> Iterator[tuple[str, LoadTarget]]:
        """Yield nothing, because transformers fills the parameters; see CausalLM.tensors."""
        return iter(())

    def top_level_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See `tensors`."""
        return iter(())

    def _replace_modules(self, model: Any) -> None:
        """Take the weights from a loaded model, and replace its linear layers, its embedding and its attention."""
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise self._error("its attention does not call the attention functions of transformers")
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        shape, size = self.shape, (self.shape.vocab_size, self.shape.embedding_size)
        if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
            raise self._error("it has no embedding, or no output projection, of the usual kind")
        if embedding.weight.shape != size or head.weight.shape != size:
            raise self._error(
                f"its embedding has the shape {tuple(embedding.weight.shape)}; config.json implies {size}"
            )
        if (head.weight is embedding.weight) != shape.tie_word_embeddings:
            raise self._error(
                f"tie_word_embeddings is {shape.tie_word_embeddings} in config.json, but not in the loaded model"
            )
        self.embed_tokens, self.lm_head.weight = embedding.weight.data, head.weight.data
        self.lm_head.bias = None if head.bias is None else head.bias.data
        fuse(model)
        model.set_input_embeddings(EmbeddingModule(self.embed, embedding))
        model.set_output_embeddings(_single(self.lm_head))
        path = shape.architecture_info.layers_path
        for index, layer in enumerate(self.layers):
            for paths, linear in layer.linears.items():
                self._replace_linears(model, [f"{path}.{index}.{name}" for name in paths], linear)
        self._replace_other_linears(model)
        self._base = getattr(model, model.base_model_prefix)
        setattr(model, model.base_model_prefix, IdentityModel())
        self._head = model

    def _replace_linears(self, model: nn.Module, paths: Sequence[str], linear: Linear) -> None:
        """Replace the linear layers at `paths` by the parts of `linear`, which takes their weights."""
        try:
            modules = [model.get_submodule(path) for path in paths]
        except AttributeError as error:
            raise self._error(f"it has no layer {paths[0]}") from error
        layers = [module for module in modules if isinstance(module, nn.Linear)]
        sizes = [tuple(layer.weight.shape) for layer in layers]
        if sizes != [(width, linear.in_features) for width in linear.slices.values()]:
            widths = ", ".join(map(str, linear.slices.values()))
            raise self._error(f"{paths[0]} is not a linear layer of {linear.in_features} to {widths} features")
        weights = [layer.weight.data for layer in layers]
        linear.weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        biases = [None if layer.bias is None else layer.bias.data for layer in layers]
        if any(bias is not None for bias in biases):
            zeros = (weight.new_zeros(len(weight)) for weight in weights)
            linear.bias = torch.cat([zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)])
        merged, start = MergedLinear(linear), 0
        for path, width in zip(paths, linear.slices.values(), strict=True):
            model.set_submodule(path, LinearModule(merged, start, start + width))
            start += width

    def _replace_other_linears(self, model: nn.Module) -> None:
        """Replace the linear layers that adapters cannot change. They are not quantized."""
        factory = replace(self._factory, quantization=None, device=torch.device("meta"))
        for path, module in list(model.named_modules()):
            if type(module) not in (nn.Linear, Conv1D) or module.weight.dtype != self._factory.dtype:
                continue
            weight = module.weight.data if type(module) is nn.Linear else module.weight.data.t().contiguous()
            linear = Linear(weight.shape[1], {path: weight.shape[0]}, factory)
            linear.weight, linear.bias = weight, None if module.bias is None else module.bias.data
            model.set_submodule(path, _single(linear))
            self.outer_linears.append(linear)

    def _check(self, prompts: list[list[int]], expected: list[Tensor]) -> None:
        """Compare the logits of two sequences, whose tokens are computed in chunks and in the same steps, with those of
        transformers.

        Raises:
            ConfigError: a layer did not call our attention, or the logits differ.
        """
        dtype, device, block_size = self._factory.dtype, self._factory.device, 16
        tables = [list(map(BlockId, range(4 * i, 4 * i + 4))) for i in range(len(prompts))]
        kv_cache = KVCache(self.shape, 4 * len(prompts), block_size, dtype, device)
        sequences = [TokenSequence(i, tokens, SamplingParams(), 0, 1) for i, tokens in enumerate(prompts)]
        starts, logits = [0] * len(prompts), list(expected)
        for sequence, table in zip(sequences, tables, strict=True):
            sequence.block_table = table
        for lengths in _CHECKED_CHUNKS:
            chosen = [i for i, length in enumerate(lengths) if length]
            spans = [ScheduledSpan(sequences[i], starts[i], lengths[i], None) for i in chosen]
            batch = build_forward_batch(build_step_input(spans, block_size), kv_cache, device)
            try:
                hidden = self(batch, kv_cache)
                rows = [] if hidden is None else list(self.compute_logits(hidden, batch))
            except ConfigError as error:
                raise self._error(str(error)) from error
            except Exception as error:
                if CausalMask.__name__ in str(error):
                    raise self._error("its layers compute with the mask of their attention") from error
                raise self._error(f"a step failed with {type(error).__name__}: {error}") from error
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
            for i in chosen:
                if starts[i] == len(prompts[i]):
                    logits[i] = rows.pop(0)
        for row, reference in zip(logits, expected, strict=True):
            deviation = (reference - reference.mean()).norm()
            difference = ((row.float() - reference).norm() / deviation).item()
            if not difference <= _MAX_ERROR.get(dtype, _MAX_ERROR_IN_HALF):
                raise self._error(
                    f"its logits differ from those of transformers by {difference:.2g} of their deviation, so it "
                    "computes positions or masks that do not fit the KV cache"
                )

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(f"model_impl: transformers cannot serve {self.shape.architecture}: {reason}")


def _from_pretrained(shape: ModelConfig, folder: Path, dtype: torch.dtype) -> Any:
    """Load a checkpoint with the class of transformers on the CPU; raises ConfigError if it does not fit the class."""
    try:
        model, info = getattr(transformers, shape.architecture).from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{folder}: transformers cannot load it: {error}") from error
    for kind in ("missing", "unexpected"):
        if names := sorted(info[f"{kind}_keys"]):
            raise ConfigError(f"{folder}: {summarize_names(names)} {kind}; config.json does not match this checkpoint")
    return model.eval().requires_grad_(False)


def _reference_logits(model: Any, prompt: list[int], device: torch.device) -> Tensor:
    """Return the logits of the last token of a prompt, float32, as transformers computes them."""
    ids = torch.tensor([prompt], device=device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, -1].float()
    return logits


@contextmanager
def _computing(current: Pass) -> Iterator[None]:
    """Make a pass the one that modules of this thread compute."""
    token = CURRENT_PASS.set(current)
    try:
        yield
    finally:
        CURRENT_PASS.reset(token)
    if current.num_calls.count(1) != len(current.num_calls):
        layer = next(i for i, number in enumerate(current.num_calls) if number != 1)
        raise ConfigError(f"layer {layer} does not call the attention functions of transformers, so it has no KV cache")


def _single(linear: Linear) -> LinearModule:
    return LinearModule(MergedLinear(linear), 0, sum(linear.slices.values()))


def _merge(sizes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the linear layers, those with the same input together."""
    done: set[str] = set()
    for path in sizes:
        if path in done:
            continue
        parent = path.rpartition(".")[0]
        paths: tuple[str, ...] = (path,)
        for names in _MERGED_LINEARS:
            group = tuple(f"{parent}.{name}" for name in names)
            if path in group and all(each in sizes for each in group):
                paths = group
        done.update(paths)
        yield paths
