# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint turns the last hidden states of a prompt into a vector: an embedding, or the scores of a classifier.

It is read from the files of sentence-transformers (modules.json, the folders that it lists) and from config.json.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from quire_spec.dataclass_json import read_json
from quire_spec.errors import ConfigError, truncated_repr
from quire_spec.model.hf_config import HFConfigReader
from quire_spec.model.model_config import ModelConfig

MODULES_FILE = "modules.json"
MODULE_FILES = ("config.json", "model.safetensors")
"""Files of a module that follows the layers. Modules without weights have only the first one."""
_POOLING_BY_MODE = {
    **dict.fromkeys(("lasttoken", "pooling_mode_lasttoken"), "last"),
    **dict.fromkeys(("cls", "pooling_mode_cls_token"), "cls"),
    **dict.fromkeys(("mean", "pooling_mode_mean_tokens"), "mean"),
    **dict.fromkeys(("weightedmean", "pooling_mode_weightedmean_tokens"), "weighted_mean"),
}
"""Maps the names of sentence-transformers to the values of `PoolerConfig.pooling`."""
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
"""Classes of torch.nn that a Dense layer can have as its activation."""
_MAX_MODULES = 16
_FOLDER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
MAX_LABELS = 65536
STEP_TOKEN = "<extra_0>"
"""Qwen2.5-Math-PRM judges the text before each of these tokens."""
_DEFAULT_TOKENS = ("no", "yes")


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A Dense layer after the pooling."""

    folder: str
    """Folder of its weights, relative to the checkpoint."""
    in_features: int
    out_features: int
    has_bias: bool
    activation: str
    """One of ACTIVATIONS."""


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """What follows the last hidden states."""

    task: str
    """What the model returns: embed, classify, or token_classify. See `tasks`."""
    size: int
    """Number of elements of the vector."""
    pooling: str = "last"
    """last, cls (the first token), mean, or weighted_mean, in which the weight of a token is its position, counted from
    1."""
    dense: tuple[DenseConfig, ...] = ()
    normalize: bool = False
    """Whether the Euclidean norm of the embedding is 1."""
    dimensions: tuple[int, ...] | None = None
    """Numbers of first elements that are valid embeddings themselves (Matryoshka). Empty: all numbers. None: only the
    whole embedding is valid."""
    activation: str = "Identity"
    """What converts the scores of a classifier to probabilities: Softmax, Sigmoid, or Identity."""
    labels: tuple[str, ...] = ()
    """Names of the scores of a classifier."""
    tokens: tuple[str | int, ...] = ()
    """If the score is the logit of a token, or the logit of the first token minus that of the second one: their texts
    or ids. Otherwise empty."""
    step_token: str = ""
    """Only tokens with this text have a vector. Empty: all tokens have one."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Values of PoolingParams.task that the model supports."""
        return (self.task,) if self.task == "token_classify" else (self.task, f"token_{self.task}")

    @classmethod
    def load(cls, folder: Path, model: ModelConfig, convert: str = "auto", pooling_type: str = "auto") -> Self | None:
        """Read the checkpoint in `folder`; return None if it only generates.

        `convert` and `pooling_type` are fields of EngineConfig.

        Raises:
            ConfigError: a file is wrong, or contains something that is not supported; or `convert` or `pooling_type`
                do not fit the checkpoint.
        """
        has_modules = (folder / MODULES_FILE).is_file()
        default_pooling = "last" if model.encoder is None else "cls"
        if model.num_labels:
            if convert == "embed":
                raise ConfigError("convert: must be auto or classify for a classifier, got 'embed'; remove it")
            pooler = cls._classifier(folder, model)
            if pooling_type != "auto" and model.encoder is not None:
                raise ConfigError(
                    f"pooling_type: got {pooling_type!r}, but the head of this encoder needs {pooler.pooling!r}; "
                    "remove it"
                )
        elif model.encoder is not None and convert in ("none", "classify"):
            raise ConfigError(
                f"convert: must be auto or embed for an encoder without the head of a classifier, got {convert!r}; "
                "remove it"
            )
        elif convert == "classify":
            if model.head == "none":
                raise ConfigError(
                    "convert: classify needs an output projection, which this checkpoint lacks; remove it"
                )
            stored = cls._from_modules(folder, model) if has_modules else None
            pooler = stored if stored is not None and stored.task == "classify" else cls._from_tokens(folder)
        elif convert == "none" or (convert == "auto" and not has_modules and model.head == "lm"):
            if pooling_type != "auto":
                raise ConfigError(f"pooling_type: got {pooling_type!r}, but the model generates; set convert to embed")
            return None
        elif has_modules:
            pooler = cls._from_modules(folder, model)
        else:
            pooler = cls("embed", model.embedding_size, default_pooling, normalize=True)
        if convert == "embed" and pooler.task != "embed":
            pooler = cls("embed", model.embedding_size, default_pooling, normalize=True)
        if pooling_type != "auto":
            pooler = replace(pooler, pooling=pooling_type)
        return replace(pooler, dimensions=_dimensions(folder)) if pooler.task == "embed" else pooler

    @classmethod
    def _classifier(cls, folder: Path, model: ModelConfig) -> Self:
        config = read_json(folder / "config.json")
        labels = config.get("id2label") or {}
        if model.head == "reward":
            return cls("classify", model.num_labels, labels=("LABEL_0",))
        if model.head == "step_reward":
            names = ("LABEL_0", "LABEL_1")
            return cls("token_classify", model.num_labels, activation="Softmax", labels=names, step_token=STEP_TOKEN)
        problem_type = config.get("problem_type")
        activation = "Sigmoid" if model.num_labels == 1 or problem_type == "multi_label_classification" else "Softmax"
        if model.num_labels > MAX_LABELS:
            raise ConfigError(f"config.json: id2label: must have at most {MAX_LABELS} labels, got {model.num_labels}")
        return cls(
            "token_classify" if model.head == "token_score" else "classify",
            model.num_labels,
            "last" if model.encoder is None else model.encoder.score_pooling,
            activation=_score_activation(folder, "Identity" if problem_type == "regression" else activation),
            labels=tuple(str(labels.get(str(i), f"LABEL_{i}")) for i in range(model.num_labels)),
        )

    @classmethod
    def _from_tokens(cls, folder: Path) -> Self:
        names = read_json(folder / "config.json").get("classifier_from_token", _DEFAULT_TOKENS)
        if not (isinstance(names, list | tuple) and len(names) == 2 and all(isinstance(name, str) for name in names)):
            raise ConfigError(
                f"config.json: classifier_from_token: must be a list of two tokens, got {truncated_repr(names)}"
            )
        return cls("classify", 1, activation="Sigmoid", labels=(names[1],), tokens=(names[1], names[0]))

    @classmethod
    def _from_modules(cls, folder: Path, model: ModelConfig) -> Self:
        pooler: Self | None = None
        for index, (kind, path) in enumerate(_read_modules(folder)):
            if index == 0 and kind == "Transformer":
                continue
            if kind == "Pooling" and pooler is None:
                values = HFConfigReader(read_json(folder / path / "config.json"), location=f"{path}/config.json")
                pooler = cls("embed", model.embedding_size, _pooling(values))
            elif kind == "LogitScore" and pooler is None and model.head == "lm":
                values = HFConfigReader(read_json(folder / path / "config.json"), location=f"{path}/config.json")
                tokens = [
                    values.get_int(name, maximum=model.vocab_size - 1, minimum=0)
                    for name in ("true_token_id", "false_token_id")
                    if name == "true_token_id" or name in values
                ]
                activation = _score_activation(folder, "Sigmoid")
                pooler = cls("classify", 1, activation=activation, labels=("LABEL_0",), tokens=tuple(tokens))
            elif kind == "Dense" and pooler is not None and pooler.task == "embed" and not pooler.normalize:
                dense = _dense(folder, path)
                if dense.in_features != pooler.size:
                    raise ConfigError(
                        f"{path}/config.json: in_features: must be {pooler.size}, got {dense.in_features}"
                    )
                pooler = replace(pooler, dense=(*pooler.dense, dense), size=dense.out_features)
            elif kind == "Normalize" and pooler is not None and pooler.task == "embed":
                pooler = replace(pooler, normalize=True)
            else:
                raise ConfigError(
                    f"modules.json: module {index}: {kind} is not supported at this place; supported are Transformer, "
                    "Pooling, Dense and Normalize, in this order, or Transformer and LogitScore"
                )
        # Without a module for it, sentence-transformers pools by the mean.
        return pooler or cls("embed", model.embedding_size, "mean")


def module_folders(folder: Path) -> list[str]:
    """Return the folders of the modules that follow the layers, relative to the checkpoint in `folder`. The list is
    empty if there is no modules.json.

    Raises:
        ConfigError: the file is wrong.
    """
    if not (folder / MODULES_FILE).is_file():
        return []
    return [path for _, path in _read_modules(folder) if path]


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the class and the folder of each module."""
    modules = read_json(folder / MODULES_FILE)
    if not isinstance(modules, list) or not 0 < len(modules) <= _MAX_MODULES:
        raise ConfigError(f"{MODULES_FILE}: must be a list of 1 to {_MAX_MODULES} modules")
    return [_module(module) for module in modules]


def _module(module: object) -> tuple[str, str]:
    """Return the class and the folder of an entry of modules.json."""
    values = HFConfigReader(module, location="modules.json")
    path = values.get_str("path", "")
    if path and not _FOLDER.fullmatch(path):
        raise ConfigError(f"modules.json: path: must be a folder in the checkpoint, got {truncated_repr(path)}")
    return values.get_str("type").rpartition(".")[2], path


def _pooling(values: HFConfigReader) -> str:
    if "pooling_mode" in values:
        mode = values.get_raw("pooling_mode")
        modes = mode if isinstance(mode, list) else [mode]
    else:
        modes = [key for key in values if key.startswith("pooling_mode_") and values.get_bool(key)]
    pooling = _POOLING_BY_MODE.get(modes[0]) if len(modes) == 1 and isinstance(modes[0], str) else None
    if pooling is None:
        raise values.error("pooling_mode", modes, "exactly one of lasttoken, cls, mean and weightedmean")
    return pooling


def _dense(folder: Path, path: str) -> DenseConfig:
    values = HFConfigReader(read_json(folder / path / "config.json"), location=f"{path}/config.json")
    activation = values.get_str("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise values.error("activation_function", activation, f"one of {', '.join(ACTIVATIONS)}")
    sizes = values.get_int("in_features"), values.get_int("out_features")
    return DenseConfig(path, *sizes, values.get_bool("bias", True), activation)


def _score_activation(folder: Path, default: str) -> str:
    """Return the activation of a score that sentence-transformers has stored; it can be any class there, of which only
    two keep a score comparable."""
    config, own = read_json(folder / "config.json"), folder / "config_sentence_transformers.json"
    sections = [config.get("sentence_transformers"), read_json(own) if own.is_file() else None]
    names = [section.get("activation_fn") for section in sections if isinstance(section, Mapping)]
    names.append(config.get("sbert_ce_default_activation_function"))
    name = next((name for name in names if isinstance(name, str)), default).rpartition(".")[2]
    return name if name in ("Identity", "Sigmoid") else default


def _dimensions(folder: Path) -> tuple[int, ...] | None:
    """Return the valid numbers of elements, from the keys of config.json that vLLM reads."""
    values = HFConfigReader(read_json(folder / "config.json"))
    if "matryoshka_dimensions" in values:
        return values.get_int_list("matryoshka_dimensions")
    return () if values.get_bool("is_matryoshka", False) else None
