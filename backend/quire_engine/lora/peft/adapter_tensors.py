# SPDX-License-Identifier: Apache-2.0
"""The tensors of an adapter's file: what each of them changes, by its name.

Untrusted: a name that this reader does not know is an error, because PEFT would apply the tensor.
"""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Self

from quire_engine.lora.peft.config import CONFIG_FILE, PeftConfig
from quire_engine.lora.peft.expert_tensors import ExpertTensors, find_expert_tensors
from quire_engine.lora.peft.lora_module import NO_LAYER, LoRAModule, lora_modules, router_path
from quire_spec.errors import InvalidArgument, truncated_repr
from quire_spec.model.model_config import ModelConfig

WEIGHTS_FILE = "adapter_model.safetensors"

SCORE_NAMES = frozenset(("score", "classifier"))
"""Names of the head of a classifier, beside the inner model."""
_SCORE_PARTS = {"score": "", "classifier": "", "classifier.out_proj": ""}
_SCORE_PARTS |= dict.fromkeys(("classifier.dense", "pre_classifier"), "dense.")
"""Maps the paths of the layers of a head to the prefixes of their parts in `AdapterTensors.score`."""
_TENSOR_NAME = re.compile(
    r"base_model\.model\.(?P<module>[\w.]{1,200}?)\."
    r"(lora_(?P<half>[AB])\.weight|lora_embedding_(?P<embedding_half>[AB])|(?P<base>(base_layer\.)?weight)"
    r"|(?P<magnitude>lora_magnitude_vector)|(?P<lora_bias>lora_B\.bias)|(?P<bias>(base_layer\.)?bias)"
    r"|(?P<tokens>token_adapter\.trainable_tokens_delta))"
)
# Modules of a model that reads images or sound, beside its language model. They cannot change an output for a text.
_OTHER_PART = re.compile(
    r"base_model\.model\.(model\.)?"
    r"((?P<vision>vision_tower|multi_modal_projector|visual|embed_vision)|audio_tower|embed_audio)\."
)
_EXTRAS = ("magnitude", "lora_bias", "bias")
"""Groups of _TENSOR_NAME with tensors that change a module beside A and B."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """Names of the tensors in a file."""

    pairs: dict[LoRAModule, dict[str, str]]
    """Names of A and B, for each adapted module."""
    experts: dict[LoRAModule, ExpertTensors]
    """Names of A and B, for each adapted projection of experts."""
    extras: dict[LoRAModule, dict[str, str]]
    """Names of the other tensors that change a module: magnitude, lora_bias and bias."""
    token_rows: dict[LoRAModule, str]
    """Names of the rows of trained tokens, for the embedding and the output projection."""
    base_copies: dict[str, LoRAModule]
    """Modules of the tensors that are copies of base weights."""
    saved_modules: dict[LoRAModule, str]
    """Names of the weights of an embedding and of an output projection that were trained as a whole."""
    saved_norms: dict[str, dict[str, str]]
    """Names of the tensors `weight` and `bias` of norms that were trained as a whole, by path of the norm."""
    score: Mapping[str, str] = field(default_factory=dict)
    """Names of the tensors of the head of a classifier: `weight` and `bias` of its last layer, `dense.weight` and
    `dense.bias` of the layer before it, `dense.A` and `dense.B` of the adapter of that layer. It has no `weight` if the
    adapter has no head of its own."""
    vision: str | None = None
    """Name of a tensor that changes the vision tower; None if there is no such tensor."""

    @classmethod
    def from_names(cls, keys: list[str], shape: ModelConfig, config: PeftConfig, norms: Collection[str] = ()) -> Self:
        """Sort the names of a file's tensors. `norms` are the paths of the model's norms.

        Raises:
            InvalidArgument: a tensor is unexpected, A or B of a pair is missing, the file contains no pair, or the
                tensors contradict the config.
        """
        modules = lora_modules(shape)
        # Adapters that were trained with a checkpoint's own code have the names of the checkpoint.
        modules = {module.weight_name(shape).removesuffix(".weight"): module for module in modules.values()} | modules
        pairs: dict[LoRAModule, dict[str, str]] = {}
        extras: dict[LoRAModule, dict[str, str]] = {}
        token_rows: dict[LoRAModule, str] = {}
        base_copies: dict[str, LoRAModule] = {}
        saved_modules: dict[LoRAModule, str] = {}
        saved_norms: dict[str, dict[str, str]] = {}
        score: dict[str, str] = {}
        dense = {f"{shape.architecture_info.inner_path}.pooler.dense", "pooler.dense"} if shape.encoder else set()
        dense |= {shape.encoder.score.dense} if shape.encoder else set()
        # An adapter that was trained on the inner model, without an output projection, lacks this prefix.
        outer_path, _, inner_path = shape.architecture_info.layers_path.partition(".")
        inner_names = (
            f"{inner_path}.",
            *(name.removeprefix(f"{outer_path}.") for name in norms if "layers" not in name),
        )
        is_part = bool(shape.architecture_info.text_types)
        # In this case, PEFT saves both weights, even if modules_to_save contains only one of the two modules.
        outer = [modules[name] for name in modules if name.rpartition(".")[2] in ("embed_tokens", "lm_head")]
        saves_both = config.ensure_weight_tying and shape.tie_word_embeddings
        saves_both &= any(config.saves_module(module.name) for module in outer)
        mixture = shape.architecture_info.expert_names
        old_router, router = f".{mixture.block}.", f".{mixture.module}."
        other_parts = {key: match["vision"] for key in keys if is_part and (match := _OTHER_PART.match(key))}
        if other_parts:
            logger.info(
                "adapter tensors outside the language model ignored, first of %d: %s",
                len(other_parts),
                min(other_parts),
            )
            keys = sorted(set(keys) - set(other_parts))
        experts, expert_names = find_expert_tensors(keys, config, shape)
        for tensor_name in sorted(set(keys) - expert_names):
            match = _TENSOR_NAME.fullmatch(tensor_name)
            name = match["module"] if match else ""
            # Adapters from before transformers 4.52 have the first of these prefixes. PEFT maps it in the same way.
            name = (
                re.sub(r"^language_model\.model\.", "model.language_model.", name)
                if is_part
                else name.replace(old_router, router)
            )
            if name.startswith(inner_names):
                name = f"{outer_path}.{name}"
            if match is not None and name in _SCORE_PARTS and config.saves_module(name) and match["base"]:
                part = f"{_SCORE_PARTS[name]}weight"
                if part in score:
                    raise InvalidArgument(f"tensors {score[part]!r} and {tensor_name!r}: an adapter has only one head")
                score[part] = tensor_name
                continue
            has_bias = shape.encoder is not None or shape.head == "token_score"
            if match is not None and has_bias and name in _SCORE_PARTS and match["bias"]:
                score[f"{_SCORE_PARTS[name]}bias"] = tensor_name
                continue
            if match is not None and name in dense and match["half"]:
                score[f"dense.{match['half']}"] = tensor_name
                continue
            module = modules.get(name)
            is_saved = config.saves_module(name) or (saves_both and module in outer)
            if match is not None and (match["base"] or match["bias"]) and is_saved:
                if name in norms:
                    saved_norms.setdefault(name, {})["weight" if match["base"] else "bias"] = tensor_name
                elif match["base"] and module is not None and module in outer:
                    saved_modules[module] = tensor_name
                else:
                    supported = "embed_tokens, lm_head and norms" if shape.is_native else "embed_tokens and lm_head"
                    raise InvalidArgument(
                        f"modules_to_save: {truncated_repr(name)} was trained as a whole, which is supported for "
                        f"{supported}; train other modules with target_modules"
                    )
                continue
            if match is None or module is None or module.num_experts:
                raise InvalidArgument(_unexpected_tensor_error(tensor_name, shape))
            if match["base"] and module in outer:
                base_copies[tensor_name] = module
                continue
            if match["tokens"] and module in outer:
                token_rows[module] = tensor_name
                continue
            if (extra := next((kind for kind in _EXTRAS if match[kind]), None)) is not None:
                if shape.moe is not None and module.path == router_path(shape):
                    raise InvalidArgument(f"tensor {tensor_name!r}: magnitudes and biases of routers are not supported")
                extras.setdefault(module, {})[extra] = tensor_name
                continue
            matrix = match["embedding_half" if module.path == "embed_tokens" else "half"]
            if matrix is None:
                raise InvalidArgument(_unexpected_tensor_error(tensor_name, shape))
            pairs.setdefault(module, {})[matrix] = tensor_name
        if not pairs and not experts:
            raise InvalidArgument(f"{WEIGHTS_FILE} contains no LoRA tensor")
        for names in pairs.values():
            if len(names) == 1:
                (matrix, tensor_name), counterpart = next(iter(names.items())), {"A": "B", "B": "A"}
                raise InvalidArgument(f"tensor {tensor_name!r} exists, but its lora_{counterpart[matrix]} is missing")
        if saves_both and len(saved_modules) == 1:
            path = next(iter(saved_modules)).path
            raise InvalidArgument(f"ensure_weight_tying True, but of embed_tokens and lm_head the file has only {path}")
        saved = (*(module.name for module in saved_modules), *saved_norms)
        # PEFT adds both names of a head to the adapter of a classifier, and the model has only one of them.
        for name in sorted(config.modules_to_save.difference(SCORE_NAMES if "weight" in score else ())):
            if not any(module.endswith(name) for module in saved):
                raise InvalidArgument(
                    f"modules_to_save contains {truncated_repr(name)}, but the file has no such module"
                )
        vision = min((key for key, part in other_parts.items() if part), default=None)
        tensors = cls(pairs, experts, extras, token_rows, base_copies, saved_modules, saved_norms, score, vision)
        tensors._check_experts(config)
        tensors._check_extras(config)
        tensors._check_tied_embeddings(config, shape)
        tensors._check_targets(config, shape)
        return tensors

    def _check_experts(self, config: PeftConfig) -> None:
        """Reject what PEFT rejects for parameters."""
        if not (self.experts or config.target_parameters):
            return
        for option, value in (
            ("use_dora", config.use_dora),
            ("lora_bias", config.lora_bias),
            ("alora_invocation_tokens", config.invocation_tokens),
        ):
            if value:
                raise InvalidArgument(f"{option} with experts or target_parameters is not supported, as in PEFT")

    def _check_extras(self, config: PeftConfig) -> None:
        """Reject magnitudes and biases that contradict the config."""
        for kind, option in (("magnitude", "use_dora"), ("lora_bias", "lora_bias")):
            is_set, modules = (
                getattr(config, option),
                {module for module, names in self.extras.items() if kind in names},
            )
            if modules and not is_set:
                name = min(self.extras[module][kind] for module in modules)
                raise InvalidArgument(f"tensor {name!r} exists, but {option} is not set in {CONFIG_FILE}")
            if any(module.path == "embed_tokens" for module in modules):
                raise InvalidArgument(f"{option} True is not supported if embed_tokens is adapted")
            if is_set and (missing := sorted(module.name for module in set(self.pairs) - modules)):
                raise InvalidArgument(f"{option} is True, but the file has no such tensor for {missing[0]}")
            if alone := sorted(self.extras[module][kind] for module in modules - set(self.pairs)):
                raise InvalidArgument(f"tensor {alone[0]!r} exists, but lora_A and lora_B are missing")
        trained = {module.name: names["bias"] for module, names in self.extras.items() if "bias" in names}
        allowed = {"all": set(trained), "lora_only": {module.name for module in self.pairs}}.get(config.bias, set())
        if wrong := sorted(set(trained) - allowed):
            raise InvalidArgument(
                f"tensor {trained[wrong[0]]!r}: biases were trained, but bias is {config.bias!r} in {CONFIG_FILE}"
            )

    def _check_targets(self, config: PeftConfig, shape: ModelConfig) -> None:
        """Reject a file whose tensors do not match the modules in its config: the file is truncated or belongs to
        another adapter."""
        for module in self.pairs:
            is_parameter = config.targets_parameter(module.parameter)
            if not is_parameter and (field := config.target_modules.excluding_field(module.name)) is not None:
                raise InvalidArgument(
                    f"the file has tensors for {module.name}, which {field} excludes; "
                    "use the config and the weights of the same adapter"
                )
        modules = [module for module in lora_modules(shape).values() if module not in self.pairs | self.experts]
        # Shared experts have projections with the same names as the other experts. An adapter can change one of both.
        adapted = {(module.layer, module.target) for module in self.pairs}
        adapted |= {(module.layer, name) for module in self.experts for name in module.projections}
        for module in modules:
            location = "the file" if module.layer == NO_LAYER else f"layer {module.layer}"
            for name in module.projections if module.num_experts else (module.target,):
                if name in config.target_modules.names_in_every_layer and (module.layer, name) not in adapted:
                    raise InvalidArgument(f"target_modules contains {name}, but {location} has no tensors for it")
            if config.targets_parameter(module.parameter):
                raise InvalidArgument(
                    f"target_parameters contains {module.parameter}, but {location} has no tensors for it"
                )
        parameters = [module.parameter for module in lora_modules(shape).values()]
        # PEFT adds this parameter of a router itself, also if the router is a linear layer with another name.
        added = {"gate.weight"} if shape.has_router_module else set()
        for name in sorted(set(config.target_parameters) - added):
            if not any(parameter == name or parameter.endswith(f".{name}") for parameter in parameters):
                raise InvalidArgument(
                    f"target_parameters contains {truncated_repr(name)}, which is not the weight of a linear layer, a "
                    "router or experts, such as mlp.experts.gate_up_proj"
                )

    def _check_tied_embeddings(self, config: PeftConfig, shape: ModelConfig) -> None:
        outer_targets = [module.target for module in self.pairs if module.layer == NO_LAYER]
        if config.ensure_weight_tying and shape.tie_word_embeddings and outer_targets:
            raise InvalidArgument(
                f"ensure_weight_tying True is not supported if {outer_targets[0]} is adapted, because embedding and "
                "output projection would share one adapter; train the adapter without ensure_weight_tying"
            )


def _unexpected_tensor_error(tensor_name: str, shape: ModelConfig) -> str:
    """Return the error message for a tensor that is not a LoRA matrix of this model."""
    layers = shape.architecture_info.layers_path
    layer_match = re.match(rf"base_model\.model\.{re.escape(layers)}\.(\d{{1,5}})\.", tensor_name)
    if layer_match and int(layer_match[1]) >= shape.num_layers:
        return (
            f"tensor {tensor_name[:200]!r}: the model has only {shape.num_layers} layers; "
            "check that the adapter is for this model"
        )
    if layer_match and shape.has_experts(layer := int(layer_match[1])):
        paths = ", ".join((*shape.layer_linears(layer), router_path(shape)))
        return (
            f"tensor {tensor_name[:200]!r}: layer {layer} is a mixture of experts, and an adapter can change "
            f"its modules {paths}, and its experts, whose tensors are named "
            f"{shape.architecture_info.expert_names.path_of('experts')}.lora_A|B.weight or "
            "experts.N.PROJECTION.lora_A|B.weight"
        )
    if tensor_name.endswith(".bias"):
        return (
            f"tensor {tensor_name[:200]!r}: bias of a module that is not a linear layer; train the adapter with bias "
            "'lora_only' or 'none'"
        )
    paths = ", ".join(shape.architecture_info.linears)
    return (
        f"tensor {tensor_name[:200]!r} is not a LoRA matrix of a linear layer; the linear layers of "
        f"{shape.architecture} are {paths}, and their matrices are named "
        f"base_model.model.{layers}.N.PATH.lora_A|B.weight; lm_head and embed_tokens can be adapted too"
    )
