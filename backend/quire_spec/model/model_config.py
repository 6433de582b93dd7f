# SPDX-License-Identifier: Apache-2.0
"""Configuration of a model, which is read from config.json.

It contains the values that memory sizing and the model definitions need.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from quire_spec.dataclass_json import read_json
from quire_spec.errors import ConfigError, truncated_repr
from quire_spec.model import capabilities
from quire_spec.model.architectures import ARCHITECTURES, TEXT_MODELS, Architecture
from quire_spec.model.attention.kimi_delta_config import KimiDeltaConfig
from quire_spec.model.attention.latent_attention_config import LatentAttentionConfig
from quire_spec.model.attention.linear_attention_config import LinearAttentionConfig
from quire_spec.model.attention.mamba2_config import Mamba2Config
from quire_spec.model.attention.short_conv_config import ShortConvConfig
from quire_spec.model.attention.state_config import StateConfig
from quire_spec.model.encoders import table as encoders
from quire_spec.model.encoders.encoder_config import EncoderConfig
from quire_spec.model.hf_config import HFConfigReader
from quire_spec.model.images.image_config import ImageConfig, mrope_axes
from quire_spec.model.layer_variants import LayerVariants
from quire_spec.model.moe_config import MoEConfig
from quire_spec.model.quantization import (
    MODELOPT_FILE,
    QUANTIZATION_KEYS,
    QuantizationScheme,
    with_modelopt_file,
)
from quire_spec.model.rope_config import RopeConfig
from quire_spec.model.transformers import table
from quire_spec.model.transformers.model_values import read_values

# Models and adapters build tables for each layer. This limit bounds their number, because config.json is untrusted
# input.
_MAX_LAYERS = 4096
# If a model contains a language model as one of its parts, these keys apply to the whole model. They take precedence
# over the same keys of `text_config`.
_ENCODER = re.compile(
    r"(Bert|Roberta|XLMRoberta(XL)?|ModernBert|DistilBert|MPNet|Electra|Albert|Deberta(V2)?|Camembert|NomicBert|JinaBert"
    r"|New|Gemma3Text|T5Encoder)(Model|For[A-Z]\w*)"
)
"""Architectures of models for embeddings and scores that are not decoders, beside those of the table of encoders."""
_HEADS = {
    "ForSequenceClassification": "score",
    "ForTokenClassification": "token_score",
    "ForRewardModel": "reward",
    "ForProcessRewardModel": "step_reward",
    "Model": "none",
}
"""Maps the end of a name in `architectures` to the head of a decoder. Longer ends come first."""
_NO_TEXT = re.compile(r"(For(?!CausalLM$)[A-Z]\w*|(?<!LMHead)Model)$")
"""Ends of the names of architectures whose classes in transformers do not continue a text."""
_SENTENCE_FILE = "sentence_bert_config.json"
"""sentence-transformers writes the maximum length of a text into this file."""
_TEXT_TYPE_ALIASES = {"kimi_k2": "deepseek_v3"}
"""Types in checkpoints with their own code, and the types that transformers has for them."""
_KEYS_OF_WHOLE_MODEL = ("tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", *QUANTIZATION_KEYS)


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """The place of a pipeline stage among the layers of its model."""

    index: int
    first_layer: int
    """Number of layers of the model before those of the stage."""
    total_layers: int
    """Number of layers of the whole model."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a decoder-only transformer, or of an encoder."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    embedding_size: int
    """Number of elements of an embedding. The output projection has the same input size. This number differs from
    hidden_size only in some OPT models."""
    max_position_embeddings: int
    """As in config.json. See `max_length`."""
    num_learned_positions: int
    """Number of rows that the table of learned positions has; 0 if positions are rotary."""
    ropes: tuple[RopeConfig, ...]
    """The rotary settings of each layer. Empty if positions are learned."""
    sliding_windows: tuple[int | None, ...]
    """For each layer, the maximum number of keys to which a token attends, including its own key. None: the number is
    not limited."""
    attention_scale: float
    """Attention scores are multiplied by this factor."""
    attention_softcap: float | None
    """An attention score becomes cap * tanh(score / cap), where cap is this value. None: scores are not capped."""
    logits_softcap: float | None
    """A logit becomes cap * tanh(logit / cap), where cap is this value. None: logits are not capped."""
    norm_eps: float
    activation: str
    """Activation function of the MLP. It is one of capabilities.ACTIVATIONS."""
    tie_word_embeddings: bool
    attention_bias: bool
    """Whether the projections to q, k and v have biases."""
    output_bias: bool
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool
    flags: Mapping[str, bool] = field(hash=False)
    """Boolean keys of config.json that only this architecture has, with their values."""
    factors: Mapping[str, float] = field(hash=False)
    """Numeric keys of config.json that only this architecture has, with their values. All values are positive."""
    moe: MoEConfig | None
    """Describes the experts that some layers have instead of an MLP. None: no layer has experts."""
    states: StateConfig | None
    """Describes the layers that have a state. None: all layers have full attention, and none has a state."""
    dtype: str
    """Data type of the activations, and of the weights that are not quantized."""
    quantization: QuantizationScheme | None
    """Describes how the weights of linear layers are quantized in the checkpoint. None: they are not quantized."""
    eos_token_ids: tuple[int, ...]
    head: str = "lm"
    """What reads the last hidden state: lm (an output projection), score (the head of a classifier), token_score (the
    head of a classifier of tokens), reward or step_reward (the two layers of a reward model), or none."""
    num_nextn_predict_layers: int = 0
    """Number of layers that predict further tokens. They come after the other layers in the checkpoint, and Quire does
    not load them."""
    num_labels: int = 0
    """Number of labels of a classifier, 1 or 2 for a reward model, and 0 for other models."""
    mla: LatentAttentionConfig | None = None
    """Describes latent attention. Then head_dim is the size of a key, and num_kv_heads is num_heads. None: the model
    has no latent attention."""
    variants: LayerVariants | None = None
    """Describes how layers differ in their heads, their MLP and their inputs. None: they do not differ."""
    images: ImageConfig | None = None
    """Describes how the model reads images. None: it reads none, or the engine does not run its vision tower."""
    encoder: EncoderConfig | None = None
    """Describes what only encoders have. In an encoder, all tokens of a sequence attend to each other, so it has no KV
    cache, and sliding_windows limit the keys after a token like those before it. None: the model is a decoder."""
    model_impl: str = "quire"
    """The class that computes the model: quire (a class of quire_engine.models) or transformers (a class of
    transformers, for which this configuration contains neither norms nor activations nor positions nor experts)."""
    attention_chunk_sizes: tuple[int | None, ...] = ()
    """For each layer, the number of tokens of a chunk, if tokens attend only to tokens of the same chunk. Empty: no
    layer has chunks."""
    stage: PipelineStage | None = None
    """If set, the configuration describes only the layers of one pipeline stage. They are counted from 0."""
    is_of_state_layer: bool = False
    """Whether `for_layer` has returned this configuration for a layer with a state; see Architecture.state_linears."""

    def with_layers(self, layers: range) -> Self:
        """Return the configuration of some adjacent layers. Those with states are not supported."""
        part = slice(layers.start, layers.stop)
        return replace(
            self,
            num_layers=len(layers),
            ropes=self.ropes[part],
            sliding_windows=self.sliding_windows[part],
            attention_chunk_sizes=self.attention_chunk_sizes[part],
            moe=self.moe and replace(self.moe, layers=self.moe.layers[part]),
        )

    @property
    def first_layer(self) -> int:
        """Number of layers of the model before those that this configuration describes."""
        return 0 if self.stage is None else self.stage.first_layer

    @property
    def has_outer_parts(self) -> bool:
        """Whether the embedding, the final norm and the output projection belong to these layers."""
        return self.first_layer == 0

    @property
    def is_native(self) -> bool:
        """Whether a class of Quire computes the model."""
        return self.model_impl == "quire"

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a sequence. It is more than max_position_embeddings if the rope type of every
        layer extends the context."""
        lengths = [rope.max_length(self.max_position_embeddings) for rope in self.ropes if rope.rope_type != "none"]
        return min(lengths, default=self.max_position_embeddings)

    @property
    def max_length_origin(self) -> str:
        """The keys of config.json from which `max_length` comes, for messages."""
        if self.max_length > self.max_position_embeddings:
            return "max_position_embeddings and rope_scaling"
        if any(rope.rope_type == "dynamic" for rope in self.ropes):
            return "max_position_embeddings; rope type dynamic does not extend it, yarn and linear do"
        return "max_position_embeddings"

    @property
    def per_layer_size(self) -> int:
        """Number of elements of the embedding that each layer has for each token; 0 if layers have none."""
        return 0 if self.variants is None else self.variants.per_layer_size

    @property
    def architecture_info(self) -> Architecture:
        """The row for this model's architecture in the table of the implementation that computes it."""
        if self.encoder is not None:
            return encoders.ENCODERS[self.architecture]
        return (ARCHITECTURES if self.is_native else table.SERVED)[self.architecture]

    def kv_heads(self, layer: int) -> tuple[int, int]:
        """Return the number of heads and their dimension in the KV cache of a layer."""
        if self.mla is not None:
            return 1, self.mla.row_size
        shape = self.for_layer(layer)
        return shape.num_kv_heads, shape.head_dim

    @property
    def num_kv_tensors(self) -> int:
        """2 if the KV cache has a key and a value for each token, 1 if these are the same row."""
        return 2 if self.mla is None else 1

    @property
    def smallest_heads(self) -> tuple[int, int]:
        """Number of KV heads and head dimension of the layers with the smallest keys."""
        if self.variants is None:
            return self.kv_heads(0)
        return min((self.kv_heads(layer) for layer in range(self.num_layers)), key=math.prod)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has a mixture of experts instead of an MLP."""
        return self.moe is not None and self.moe.layers[layer]

    def has_state(self, layer: int) -> bool:
        """Return whether a layer has a state; see StateConfig."""
        return self.states is not None and self.states.layers[layer]

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer has attention, so that it has keys and values."""
        return self.states is None or self.states.attention_layers[layer]

    @property
    def num_kv_layers(self) -> int:
        """Number of layers whose keys and values are kept."""
        if self.encoder is not None:
            return 0
        return sum(map(self.has_attention, range(self.num_layers)))

    def for_layer(self, layer: int) -> Self:
        """Return the configuration with the linears, the heads and the intermediate size of one layer. Layers are
        counted from 0."""
        if self.has_state(layer) and self.architecture_info.state_linears:
            return replace(self, is_of_state_layer=True)
        if (variants := self.variants) is None:
            return self
        is_full, is_shared = self.sliding_windows[layer] is None, self.kv_source(layer) != layer
        return replace(
            self,
            num_kv_heads=variants.full_num_kv_heads if is_full else self.num_kv_heads,
            head_dim=variants.full_head_dim if is_full else self.head_dim,
            intermediate_size=self.intermediate_size * (variants.shared_mlp_factor if is_shared else 1),
        )

    def kv_elements(self, layer: int) -> int:
        """Return the number of elements of a token's key in a layer, with all KV heads; a value has as many."""
        return math.prod(self.kv_heads(layer))

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads. In most models, this is the layer itself. A layer
        without attention reads none; the result is then any layer that has them."""
        if self.states is not None:
            return layer if self.has_attention(layer) else self.states.attention_layers.index(True)
        num_own = self.num_layers - (0 if self.variants is None else self.variants.num_kv_shared_layers)
        if layer < num_own:
            return layer
        is_full = self.sliding_windows[layer] is None
        return next(each for each in reversed(range(num_own)) if (self.sliding_windows[each] is None) == is_full)

    @property
    def unused_prefixes(self) -> tuple[str, ...]:
        """The names of tensors that are not loaded begin with these prefixes."""
        total = self.num_layers if self.stage is None else self.stage.total_layers
        own = range(self.first_layer, self.first_layer + self.num_layers)
        path = self.architecture_info.layers_path
        score = ("score.", "classifier.", "lm_head.") if self.num_labels else ()  # the pooler reads it
        layers = (f"{path}.{layer}." for layer in range(total + self.num_nextn_predict_layers) if layer not in own)
        return (*layers, *score, *self.architecture_info.unused_prefixes)

    @property
    def has_router_module(self) -> bool:
        """Whether the router is a linear layer within a module, not a parameter of the mixture itself."""
        return self.moe is not None and "." in self.architecture_info.expert_names.router

    @property
    def linears(self) -> Mapping[str, tuple[str, str]]:
        """Architecture.linears, with the kinds of features in the layer for which `for_layer` has returned this."""
        info = self.architecture_info
        return {**info.linears, **info.state_linears} if self.is_of_state_layer else info.linears

    def layer_linears(self, layer: int) -> tuple[str, ...]:
        """Return the paths of the linears in a layer. Adapters can change each of these linears. Shared experts are
        included, other experts and routers are not."""
        linears, variants = self.architecture_info.linears, self.variants
        absent = tuple(path for path in linears if not self._is_of_kind(layer, path))
        if variants is not None:
            if self.kv_source(layer) != layer:
                absent += ("self_attn.k_proj", "self_attn.v_proj")
            elif self.sliding_windows[layer] is None and not variants.full_has_values:
                absent += ("self_attn.v_proj",)
            if not variants.per_layer_size:
                absent += ("per_layer_input_gate", "per_layer_projection")
        if self.mla is not None and self.has_attention(layer):
            names = ("q_proj",) if self.mla.query_rank else ("q_a_proj", "q_b_proj")
            absent += tuple(f"self_attn.{name}" for name in names)
        return tuple(path for path in linears if path not in absent)

    def _is_of_kind(self, layer: int, path: str) -> bool:
        """Return whether layers with the kind of attention and of feed-forward part of this layer have a linear."""
        kinds, has_experts = self.for_layer(layer).linears[path], self.has_experts(layer)
        if "expert_latent" in kinds:
            return has_experts and self.moe is not None and self.moe.latent_size > 0
        if "shared_inner" in kinds or "one" in kinds:
            return has_experts and self.moe is not None and self.moe.shared_intermediate_size > 0
        if "inner" in kinds or "gate_up" in kinds:
            if self.architecture_info.has_single_blocks and (self.has_state(layer) or self.has_attention(layer)):
                return False
            return not has_experts or self.architecture_info.expert_names.is_beside_mlp
        if any(kind.startswith("state_") for kind in kinds):
            return self.has_state(layer)
        return self.has_attention(layer)

    @property
    def max_sliding_window(self) -> int | None:
        """The largest number of keys to which a token attends in any layer, including its own key. None: the number is
        not limited."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def tied_embedding_name(self) -> str | None:
        """Name of the embedding tensor if the model also uses it as the output projection.

        None if the output projection has its own tensor.
        """
        return (
            f"{self.architecture_info.parent_path}{self.architecture_info.embedding}.weight"
            if self.tie_word_embeddings
            else None
        )

    @property
    def long_rope_threshold(self) -> int | None:
        """If a sequence is longer than this, all of its keys use `long_factor`. None: the rope type is not longrope."""
        return next((rope.long_threshold for rope in self.ropes if rope.long_threshold is not None), None)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model_impl: str = "auto") -> Self:
        """Read a Hugging Face config.json. `model_impl` is a value of capabilities.MODEL_IMPLS.

        Raises:
            ConfigError: the architecture is not supported, or a value is missing, has the wrong type, or is not
                supported (the message names its key). The message also contains whether the other implementation can
                serve the model.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"config.json: expected an object, got {type(config).__name__}")
        names = config.get("architectures") or ["none"]
        name = names[0] if isinstance(names, list) else names
        if not isinstance(name, str):
            raise ConfigError(f"config.json: architectures: must contain a name, got {truncated_repr(name)}")
        if encoders.split_name(name) is not None and model_impl != "transformers":
            return cls._from_encoder(config, name)
        is_native = _split_head(name)[0] in ARCHITECTURES
        if model_impl == "transformers" or (model_impl == "auto" and not is_native and name in table.SERVED):
            return cls._from_transformers(config, name)
        try:
            return cls._from_native(config, name)
        except ConfigError as error:
            try:
                cls._from_transformers(config, name)
            except ConfigError:
                raise error from None
            raise ConfigError(f"{error}; model_impl transformers can serve this model, but more slowly") from error

    @classmethod
    def _from_transformers(cls, config: Mapping[str, Any], architecture: str) -> Self:
        """Read a config.json for a class of transformers."""
        if architecture not in table.SERVED:
            raise ConfigError(
                f"config.json: architecture {architecture!r} cannot be served with model_impl transformers: "
                f"{_unserved_reason(architecture)}"
            )
        row = table.SERVED[architecture]
        if config.get("model_type") != row.model_type:
            raise ConfigError(
                f"config.json: model_type of architecture {architecture!r} must be {row.model_type!r}, got "
                f"{config.get('model_type')!r}; correct one of them"
            )
        values = read_values(config, row)
        # What only classes of Quire read has a neutral value.
        unused: dict[str, Any] = dict.fromkeys(("attention_softcap", "logits_softcap", "moe", "states"))
        unused |= dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), False)
        unused |= {"flags": {}, "factors": {}, "ropes": (), "norm_eps": 1e-6, "activation": "silu"}
        unused |= {"num_learned_positions": 0, "quantization": None, "attention_scale": values["head_dim"] ** -0.5}
        return cls(architecture=architecture, model_impl="transformers", **values, **unused)

    @classmethod
    def _from_native(cls, config: Mapping[str, Any], name: str) -> Self:
        """Read a config.json for a class of Quire."""
        given = name
        architecture, head = _split_head(name)
        if _ENCODER.fullmatch(architecture):
            raise ConfigError(
                f"config.json: architecture {architecture!r} is an encoder that is not served; use a decoder for "
                f"embeddings or scores, such as Qwen3-Embedding, or an encoder of {', '.join(encoders.ENCODERS)} with "
                f"one of these names or with {' or '.join(list(encoders.HEADS)[1:])} at its end"
            )
        if architecture not in ARCHITECTURES:
            advice = (
                "" if name in table.SERVED else f", and no class of transformers can serve it: {_unserved_reason(name)}"
            )
            raise ConfigError(f"config.json: architecture {name!r} is not supported: Quire has no class for it{advice}")
        model_type = config.get("model_type")
        for name, info in ARCHITECTURES.items():
            if info.model_type == model_type and info.saved_as == architecture:
                architecture = name
        architecture_info = ARCHITECTURES[architecture]
        # transformers selects the model by type, vLLM by architecture. The two must agree.
        known_types = [info.model_type for info in ARCHITECTURES.values()]
        if model_type != architecture_info.model_type and model_type in known_types:
            advice = "correct one of them" if head == "lm" else "save the language model alone, which reads no images"
            raise ConfigError(
                f"config.json: model_type of architecture {given!r} must be {architecture_info.model_type!r}, got "
                f"{model_type!r}; {advice}"
            )
        images = ImageConfig.from_config(config)
        if architecture_info.text_types:
            architecture = _row_by_text_type(config, architecture_info) or architecture
            config, architecture_info = _text_config(config, ARCHITECTURES[architecture])
        reader = _translated_reader(config, architecture_info)
        model_config = replace(cls._from_hf_config(reader, architecture, architecture_info), images=images)
        if head == "lm":
            return model_config
        # There is no output projection. The embedding takes its place, and nothing reads it.
        num_labels = {"none": 0, "reward": 1, "step_reward": 2}.get(head)
        num_labels = _num_labels(config) if num_labels is None else num_labels
        return replace(model_config, head=head, num_labels=num_labels, tie_word_embeddings=True)

    @classmethod
    def _from_encoder(cls, config: Mapping[str, Any], name: str) -> Self:
        """Read a config.json of an encoder."""
        names = encoders.split_name(name)
        assert names is not None
        (architecture, head), row = names, encoders.ENCODERS[names[0]]
        if config.get("model_type") != row.model_type:
            raise ConfigError(
                f"config.json: model_type of architecture {name!r} must be {row.model_type!r}, got "
                f"{truncated_repr(config.get('model_type'))}; correct one of them"
            )
        reader = _translated_reader(config, row)
        skips_padding = bool(row.learned_position_offset)
        encoder = EncoderConfig.from_hf_config(reader, encoders.score_names(architecture, head), skips_padding)
        # There is no output projection. The embedding takes its place, and nothing reads it.
        return replace(
            cls._from_hf_config(reader, architecture, row),
            head=head,
            num_labels=0 if head == "none" else _num_labels(config),
            tie_word_embeddings=True,
            encoder=encoder,
        )

    @classmethod
    def load(cls, folder: Path, model_impl: str = "auto") -> Self:
        """Read `folder`/config.json, and MODELOPT_FILE if it exists. Raises ConfigError if a file cannot be read, or if
        `from_config` rejects its content."""
        modelopt = folder / MODELOPT_FILE
        document = read_json(modelopt) if modelopt.is_file() else None
        model = cls.from_config(with_modelopt_file(read_json(folder / "config.json"), document), model_impl)
        sentences = folder / _SENTENCE_FILE
        if model.encoder is None or not sentences.is_file():
            return model
        values = HFConfigReader(read_json(sentences), location=_SENTENCE_FILE)
        length = values.get_int("max_seq_length", model.max_position_embeddings)
        return replace(model, max_position_embeddings=min(length, model.max_position_embeddings))

    @classmethod
    def _from_hf_config(cls, config: HFConfigReader, architecture: str, architecture_info: Architecture) -> Self:
        num_layers, hidden = config.get_int("num_hidden_layers", maximum=_MAX_LAYERS), config.get_int("hidden_size")
        mla = LatentAttentionConfig.from_hf_config(config) if architecture_info.has_latent_attention else None
        heads, kv_heads, head_dim = _head_counts(config, hidden, mla)
        positions = config.get_int("max_position_embeddings")
        qkv_bias, output_bias, mlp_bias = (
            b if isinstance(b, bool) else config.get_bool(b, False) for b in architecture_info.biases
        )
        _reject_unsupported(config, architecture_info)
        learned_offset = architecture_info.learned_position_offset
        windows = _sliding_windows(config, architecture_info, num_layers)
        variants = LayerVariants.from_hf_config(config, windows) if architecture_info.has_layer_variants else None
        if variants is not None:
            _check_full_heads(config, variants, heads, kv_heads * head_dim)
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=config.get_int(
                architecture_info.key_aliases.get("intermediate_size", "intermediate_size")
            ),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=config.get_int("vocab_size"),
            embedding_size=config.get_int("word_embed_proj_dim", hidden) if learned_offset is not None else hidden,
            max_position_embeddings=positions,
            num_learned_positions=0 if learned_offset is None else positions + learned_offset,
            ropes=()
            if learned_offset is not None
            else _ropes(
                *(config, architecture_info, head_dim if mla is None else mla.rotary_dim),
                *(None if variants is None else variants.full_head_dim, positions, num_layers),
            ),
            sliding_windows=windows,
            attention_chunk_sizes=_attention_chunk_sizes(config, architecture_info, num_layers),
            attention_scale=_get_declared_float(config, architecture_info, "attention_multiplier")
            or (_get_declared_float(config, architecture_info, "query_pre_attn_scalar") or head_dim) ** -0.5
            * (1.0 if mla is None else mla.score_factor),
            attention_softcap=_get_declared_float(config, architecture_info, "attn_logit_softcapping"),
            logits_softcap=_get_declared_float(config, architecture_info, "final_logit_softcapping"),
            norm_eps=config.get_float(architecture_info.key_aliases.get("rms_norm_eps", "rms_norm_eps"), 1e-6),
            activation=_activation(config, architecture_info),
            tie_word_embeddings=config.get_bool("tie_word_embeddings", False),
            attention_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            flags={name: config.get_bool(name) for name in architecture_info.flags},
            factors=_factors(config, architecture_info),
            moe=MoEConfig.from_hf_config(config, architecture_info.uses_experts, architecture_info.defaults, num_layers)
            if architecture_info.uses_experts is not None
            else None,
            states=_read_states(config, architecture_info, num_layers),
            dtype=config.get_str("dtype", config.get_str("torch_dtype", "float32")),
            quantization=QuantizationScheme.from_hf_config(config.get_section(*QUANTIZATION_KEYS)),
            eos_token_ids=config.get_token_ids("eos_token_id"),
            mla=mla,
            variants=variants,
            num_nextn_predict_layers=config.get_int("num_nextn_predict_layers", 0, maximum=_MAX_LAYERS, minimum=0),
        )


def _split_head(name: str) -> tuple[str, str]:
    """Return the architecture with an output projection that has the same layers, and the head of `name`."""
    for suffix, head in _HEADS.items():
        if name.endswith(suffix):
            stem = name.removesuffix(suffix)
            # transformers has Gemma3ForCausalLM, but Gemma3TextModel.
            names = (f"{each}ForCausalLM" for each in (stem, stem.removesuffix("Text")))
            causal = next((each for each in names if each in ARCHITECTURES), None)
            return (name, "lm") if causal is None else (causal, head)
    return name, "lm"


def _unserved_reason(architecture: str) -> str:
    """Return why no class of transformers can compute an architecture that is not in the table."""
    if architecture in table.REFUSED:
        return table.REFUSED[architecture]
    end = _NO_TEXT.search(architecture)
    if end is None:
        return f"transformers {table.VERSION} has no class of this name for generating text"
    if end[0] == "ForConditionalGeneration":
        return (
            "a name that ends in ForConditionalGeneration is one of a model that reads images, sound or a second text, "
            "and only models that read one text are served with a class of transformers"
        )
    return (
        "only models that generate text are served with a class of transformers, and a model with a name that ends in "
        f"{end[0]} does not"
    )


def _translated_reader(config: Mapping[str, Any], architecture_info: Architecture) -> HFConfigReader:
    """Return a reader of config.json in which keys have the names and the meaning of Llama's."""
    values = {key: value for key, value in config.items() if key not in architecture_info.ignored_keys}
    aliases = architecture_info.key_aliases.items()
    values |= {key: values[alias] for key, alias in aliases if alias in values and key not in values}
    top_k = values.get("num_experts_per_tok")
    if isinstance(top_k, list) and top_k and top_k == top_k[:1] * len(top_k):
        values["num_experts_per_tok"] = top_k[0]  # Hunyuan has a number for each layer
    reader = HFConfigReader(values, architecture_info.defaults)
    if architecture_info.translate is None:
        return reader
    return HFConfigReader(values | {**architecture_info.translate(reader)}, architecture_info.defaults)


def _num_labels(config: Mapping[str, Any]) -> int:
    """Return the number of labels as transformers reads it."""
    labels = config.get("id2label")
    if labels is None:
        return HFConfigReader(config, {}).get_int("num_labels", 2)
    if not isinstance(labels, Mapping) or not labels:
        raise ConfigError(f"config.json: id2label must be an object with a name for each label, got {labels!r:.80}")
    return len(labels)


def _row_by_text_type(config: Mapping[str, Any], architecture_info: Architecture) -> str | None:
    """Return the row that replaces the row of a multimodal model, because of the type of the language model in it."""
    text_config = config.get("text_config")
    text_type = text_config.get("model_type") if isinstance(text_config, Mapping) else None
    return architecture_info.row_by_text_type.get(text_type) if isinstance(text_type, str) else None


def _text_config(config: Mapping[str, Any], architecture_info: Architecture) -> tuple[dict[str, Any], Architecture]:
    """Return the config of the language model inside a multimodal model, and the table row for that language model."""
    text_config = config.get("text_config")
    if text_config is None and "hidden_size" in config:
        # Early Qwen-VL checkpoints have the keys of the language model at the top level.
        text_config = {**config, "model_type": architecture_info.text_types[0]}
    text_type = text_config.get("model_type") if isinstance(text_config, Mapping) else None
    if not isinstance(text_config, Mapping) or text_type not in architecture_info.text_types:
        raise ConfigError(
            f"config.json: text_config: model_type must be one of {', '.join(architecture_info.text_types)}, "
            f"got {truncated_repr(text_type)}"
        )
    outer = {key: config[key] for key in _KEYS_OF_WHOLE_MODEL if config.get(key) is not None}
    text_type = _TEXT_TYPE_ALIASES.get(text_type, text_type)
    rows = (*TEXT_MODELS.values(), *ARCHITECTURES.values())
    return {**text_config, **outer}, next(info for info in rows if info.model_type == text_type)


def _reject_unsupported(config: HFConfigReader, architecture_info: Architecture) -> None:
    """Reject settings that transformers supports for every architecture or for this one, but this engine does not."""
    for key, (required, feature) in architecture_info.required.items():
        if key in config and config.get_raw(key) != required:
            raise config.error(key, config.get_raw(key), f"{required} ({feature}: not supported)")
    if not architecture_info.has_layer_variants and not config.get_section("per_layer_config").is_empty:
        raise ConfigError("config.json: per_layer_config: a separate configuration for each layer is not supported")
    if config.get_raw("use_bidirectional_attention") == "vision":
        return  # Only the tokens of images attend in both directions.
    for key, required in (("is_causal", True), ("use_bidirectional_attention", False)):
        if config.get_bool(key, required) is not required:
            raise config.error(key, not required, f"{required} (only causal attention is supported)")


_STATE_KINDS: Mapping[str, type[StateConfig]] = {
    "gated_delta_net": LinearAttentionConfig,
    "kimi_delta": KimiDeltaConfig,
    "short_conv": ShortConvConfig,
    "mamba2": Mamba2Config,
}


def _read_states(config: HFConfigReader, architecture_info: Architecture, num_layers: int) -> StateConfig | None:
    """Return the settings of the layers with a state; None if no layer has one."""
    uses_state, uses_attention = architecture_info.uses_state, architecture_info.uses_attention
    if uses_state is None:
        return None
    layers = tuple(uses_state(config, index) for index in range(num_layers))
    attention = tuple(
        not has_state if uses_attention is None else uses_attention(config, index)
        for index, has_state in enumerate(layers)
    )
    if not any(layers):
        return None
    if not any(attention):
        raise config.error("layer_types", ["linear_attention"], "at least one layer with full_attention")
    return _STATE_KINDS[architecture_info.state_kind].from_hf_config(config, layers, attention)


def _head_counts(config: HFConfigReader, hidden_size: int, mla: LatentAttentionConfig | None) -> tuple[int, int, int]:
    """Return the number of query heads, the number of KV heads, and the head dimension."""
    heads = config.get_int("num_attention_heads")
    if mla is not None:
        return heads, heads, mla.key_dim
    kv_heads = config.get_int("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
    if "head_dim" not in config and hidden_size % heads:
        raise config.error(
            "num_attention_heads", heads, f"a divisor of hidden_size {hidden_size} unless head_dim is set"
        )
    return heads, kv_heads, config.get_int("head_dim", hidden_size // heads)


def _check_full_heads(config: HFConfigReader, variants: LayerVariants, num_heads: int, kv_elements: int) -> None:
    """Check the heads of the layers without a window. `kv_elements` is the size of a key of the other layers."""
    if num_heads % variants.full_num_kv_heads:
        raise config.error("num_attention_heads", num_heads, f"a multiple of {variants.full_num_kv_heads} KV heads")
    sizes = kv_elements, variants.full_num_kv_heads * variants.full_head_dim
    if max(sizes) % min(sizes):
        raise ConfigError(
            "config.json: head_dim x num_key_value_heads: the sizes of a key with and without a window are "
            f"{sizes[0]} and {sizes[1]}; the larger one must be a multiple of the other one"
        )


def _attention_chunk_sizes(
    config: HFConfigReader, architecture_info: Architecture, num_layers: int
) -> tuple[int | None, ...]:
    # As in transformers, null turns the chunks off.
    if architecture_info.has_attention_chunks is None:
        return ()
    if "attention_chunk_size" not in config:
        return (None,) * num_layers
    size = config.get_int("attention_chunk_size")
    return tuple(size if architecture_info.has_attention_chunks(config, index) else None for index in range(num_layers))


def _sliding_windows(
    config: HFConfigReader, architecture_info: Architecture, num_layers: int
) -> tuple[int | None, ...]:
    if architecture_info.uses_sliding_window is None or "sliding_window" not in config:
        return (None,) * num_layers
    uses_window = [architecture_info.uses_sliding_window(config, index) for index in range(num_layers)]
    window = config.get_int("sliding_window") if any(uses_window) else None
    return tuple(window if uses else None for uses in uses_window)


def _ropes(
    config: HFConfigReader,
    architecture_info: Architecture,
    head_dim: int,
    full_head_dim: int | None,
    max_positions: int,
    num_layers: int,
) -> tuple[RopeConfig, ...]:
    """Return the rotary settings for each layer. `full_head_dim` is the head dimension of the layers without a window
    if it differs."""
    scaling = config.get_section("rope_scaling", "rope_parameters")
    if architecture_info.has_latent_attention:
        # It is the rotated part of a key, which another key defines.
        scaling = scaling.without("partial_rotary_factor")
    is_by_type = "full_attention" in scaling or "sliding_attention" in scaling
    if is_by_type and architecture_info.local_rope_theta is None:
        raise ConfigError("config.json: rope_parameters: separate parameters per layer type are not supported")
    rope = RopeConfig.from_hf_config(
        config,
        scaling.get_section("full_attention") if is_by_type else scaling,
        full_head_dim or head_dim,
        max_positions,
        supports_partial="partial_rotary_factor" in architecture_info.defaults,
        aliases=architecture_info.rope_aliases,
    )
    if architecture_info.mrope_section:
        has_section = "mrope_section" in scaling
        section = scaling.get_int_list("mrope_section") if has_section else architecture_info.mrope_section
        axes = mrope_axes(section, rope.dim // 2, is_interleaved=architecture_info.mrope_interleaved)
        rope = replace(rope, mrope_axes=axes)
    if architecture_info.local_rope_theta is not None:
        local = scaling.get_section("sliding_attention")
        theta = local.get_float("rope_theta", config.get_float(architecture_info.local_rope_theta))
        local_rope = replace(RopeConfig.from_hf_config(config, local, head_dim, max_positions), theta=theta)
        uses_local = architecture_info.uses_sliding_window
        assert uses_local is not None
        return tuple(local_rope if uses_local(config, index) else rope for index in range(num_layers))
    uses_rope = architecture_info.uses_rope
    unrotated = RopeConfig("none", rope.theta, rope.dim)
    return tuple(rope if uses_rope is None or uses_rope(config, index) else unrotated for index in range(num_layers))


def _factors(config: HFConfigReader, architecture_info: Architecture) -> dict[str, float]:
    """Return the values of `Architecture.factors`, and those of `factor_lists` with the index after the name."""
    factors = {name: config.get_float(name) for name in architecture_info.factors}
    for name, length in architecture_info.factor_lists.items():
        values = config.get_float_list(name) if name in config else (1.0,) * length
        if len(values) != length:
            raise config.error(name, list(values), f"a list of {length} positive numbers")
        factors |= {f"{name}.{index}": value for index, value in enumerate(values)}
    return factors


def _get_declared_float(config: HFConfigReader, architecture_info: Architecture, key: str) -> float | None:
    """Return the number at `key` of config.json. Return None if the `defaults` of the architecture do not contain
    `key`."""
    return config.get_float(key) if key in architecture_info.defaults and key in config else None


def _activation(config: HFConfigReader, architecture_info: Architecture) -> str:
    key = architecture_info.key_aliases.get("hidden_act", "hidden_act")
    name = config.get_str(key, architecture_info.defaults.get(key, "silu"))
    name = {**capabilities.ACTIVATION_ALIASES, **architecture_info.activation_aliases}.get(name, name)
    supported = (*capabilities.ACTIVATIONS, *architecture_info.activations)
    if name not in supported:
        raise config.error(key, name, f"one of {', '.join(supported)}")
    return name
