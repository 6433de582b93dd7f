# SPDX-License-Identifier: Apache-2.0
"""Table of the supported encoders, like the table of decoders in architectures.py."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_spec.model.architectures import WHOLE_PATH_LINEARS, Architecture
from quire_spec.model.encoders.encoder_config import ScoreNames
from quire_spec.model.hf_config import HFConfigReader

HEADS: Mapping[str, str] = {
    "Model": "none",
    "ForMaskedLM": "none",
    "ForSequenceClassification": "score",
    "ForTokenClassification": "token_score",
}
"""Maps the end of a name in `architectures` to ModelConfig.head. The output projection of a masked language model is
not used."""
_BERT_LINEARS = {
    "attention.self.query": ("hidden", "q"),
    "attention.self.key": ("hidden", "kv"),
    "attention.self.value": ("hidden", "kv"),
    "attention.output.dense": ("q", "hidden"),
    "intermediate.dense": ("hidden", "inner"),
    "output.dense": ("inner", "hidden"),
}
_DISTILBERT_LINEARS = {
    "attention.q_lin": ("hidden", "q"),
    "attention.k_lin": ("hidden", "kv"),
    "attention.v_lin": ("hidden", "kv"),
    "attention.out_lin": ("q", "hidden"),
    "ffn.lin1": ("hidden", "inner"),
    "ffn.lin2": ("inner", "hidden"),
}
_MPNET_LINEARS = {
    "attention.attn.q": ("hidden", "q"),
    "attention.attn.k": ("hidden", "kv"),
    "attention.attn.v": ("hidden", "kv"),
    "attention.attn.o": ("q", "hidden"),
    "intermediate.dense": ("hidden", "inner"),
    "output.dense": ("inner", "hidden"),
}
_MODERNBERT_LINEARS = {
    "attn.Wqkv": ("hidden", "qkv"),
    "attn.Wo": ("q", "hidden"),
    "mlp.Wi": ("hidden", "gate_up"),
    "mlp.Wo": ("inner", "hidden"),
}
assert {*_BERT_LINEARS, *_DISTILBERT_LINEARS, *_MPNET_LINEARS, *_MODERNBERT_LINEARS} == WHOLE_PATH_LINEARS
_BERT = Architecture(
    "bert",
    "encoders.bert",
    linears=_BERT_LINEARS,
    layers_path="bert.encoder.layer",
    inner_path="bert",
    embedding="embeddings.word_embeddings",
    key_aliases={"rms_norm_eps": "layer_norm_eps"},
    ignored_keys=("num_key_value_heads", "head_dim"),
    defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "pad_token_id": 0},
    biases=(True, True, True),
    learned_position_offset=0,
    required={
        "position_embedding_type": ("absolute", "relative positions"),
        "is_decoder": (False, "causal attention"),
        "add_cross_attention": (False, "cross attention"),
    },
    unused_prefixes=(
        *("bert.pooler.", "pooler.", "classifier.", "cls."),
        *("bert.embeddings.position_ids", "embeddings.position_ids"),
    ),
)


def _without_padding_positions(config: HFConfigReader) -> Mapping[str, Any]:
    """The table of positions begins with rows for padding."""
    positions = config.get_int("max_position_embeddings", minimum=3)
    return {"max_position_embeddings": positions - 2}


_ROBERTA = replace(
    _BERT,
    model_type="roberta",
    layers_path="roberta.encoder.layer",
    inner_path="roberta",
    defaults={**_BERT.defaults, "pad_token_id": 1},
    learned_position_offset=2,
    translate=_without_padding_positions,
    required={**_BERT.required, "pad_token_id": (1, "positions that begin after another padding token")},
    unused_prefixes=(
        *("roberta.pooler.", "pooler.", "classifier.", "lm_head."),
        *("roberta.embeddings.position_ids", "embeddings.position_ids"),
    ),
)
_DISTILBERT = replace(
    _BERT,
    model_type="distilbert",
    linears=_DISTILBERT_LINEARS,
    layers_path="distilbert.transformer.layer",
    inner_path="distilbert",
    key_aliases={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "rms_norm_eps": "layer_norm_eps",
    },
    ignored_keys=(*_BERT.ignored_keys, "intermediate_size", "hidden_act", "layer_norm_eps"),
    defaults={"activation": "gelu", "layer_norm_eps": 1e-12},
    required={},
    unused_prefixes=("pre_classifier.", "classifier.", "vocab_"),
)
_MPNET = replace(
    _ROBERTA,
    model_type="mpnet",
    module="encoders.mpnet",
    linears=_MPNET_LINEARS,
    layers_path="mpnet.encoder.layer",
    inner_path="mpnet",
    defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 1, "relative_attention_num_buckets": 32},
    required={
        "pad_token_id": (1, "positions that begin after another padding token"),
        "relative_attention_num_buckets": (32, "another number of buckets for distances"),
    },
    unused_prefixes=(
        *("mpnet.pooler.", "pooler.", "classifier.", "lm_head."),
        *("mpnet.embeddings.position_ids", "embeddings.position_ids"),
    ),
)


def _uses_window(config: HFConfigReader, index: int) -> bool:
    if "layer_types" in config:
        layer_types = config.get_str_list("layer_types")
        if index >= len(layer_types) or layer_types[index] not in ("full_attention", "sliding_attention"):
            raise config.error("layer_types", list(layer_types), "full_attention or sliding_attention for each layer")
        return layer_types[index] == "sliding_attention"
    return index % config.get_int("global_attn_every_n_layers") != 0


def _modernbert_keys(config: HFConfigReader) -> Mapping[str, Any]:
    """A token attends to half of the window on each side. ModelConfig counts the keys on one side, and its own key."""
    window = config.get_int("local_attention") // 2 + 1
    return {"sliding_window": window, "rope_theta": config.get_float("global_rope_theta")}


_MODERNBERT = Architecture(
    "modernbert",
    "encoders.modernbert",
    linears=_MODERNBERT_LINEARS,
    layers_path="model.layers",
    embedding="embeddings.tok_embeddings",
    key_aliases={"rms_norm_eps": "norm_eps", "hidden_act": "hidden_activation"},
    ignored_keys=("num_key_value_heads", "head_dim", "partial_rotary_factor"),
    defaults={
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "classifier_pooling": "cls",
        "classifier_bias": False,
        "classifier_activation": "gelu",
    },
    biases=("attention_bias", "attention_bias", "mlp_bias"),
    uses_sliding_window=_uses_window,
    local_rope_theta="local_rope_theta",
    translate=_modernbert_keys,
    flags=("norm_bias",),
    unused_prefixes=("head.", "decoder.", "classifier."),
)

ENCODERS: Mapping[str, Architecture] = {
    "BertModel": _BERT,
    "RobertaModel": _ROBERTA,
    "XLMRobertaModel": replace(_ROBERTA, model_type="xlm-roberta"),
    "DistilBertModel": _DISTILBERT,
    "MPNetModel": _MPNET,
    "ModernBertModel": _MODERNBERT,
}
"""Rows of the table. The key of a row is the name of the inner model."""
_ROBERTA_SCORE = ScoreNames("classifier.out_proj", "classifier.dense")
SCORE_NAMES: Mapping[str, ScoreNames] = {
    "BertModel": ScoreNames("classifier", "bert.pooler.dense"),
    "RobertaModel": _ROBERTA_SCORE,
    "XLMRobertaModel": _ROBERTA_SCORE,
    "DistilBertModel": ScoreNames("classifier", "pre_classifier", activation="ReLU"),
    "MPNetModel": _ROBERTA_SCORE,
    "ModernBertModel": ScoreNames("classifier", "head.dense", "head.norm"),
}
"""For each encoder, the names of the tensors of a classifier's head."""


def score_names(architecture: str, head: str) -> ScoreNames:
    """Return the names of the tensors of a classifier's head. `head` is ModelConfig.head."""
    if head == "token_score" and architecture != "ModernBertModel":
        return ScoreNames("classifier")
    return SCORE_NAMES[architecture]


def split_name(name: str) -> tuple[str, str] | None:
    """Return the key of the row for a name in `architectures`, and the head of the model; None if the name is not that
    of a supported encoder."""
    for suffix, head in HEADS.items():
        if name.endswith(suffix) and (row := f"{name.removesuffix(suffix)}Model") in ENCODERS:
            return row, head
    return None
