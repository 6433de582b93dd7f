# SPDX-License-Identifier: Apache-2.0
"""Find out which models of the installed transformers can be served with model_impl transformers.

    hack/transformers_models.py --write    # every model that generates text: 3 minutes on two cores
    hack/transformers_models.py Helium     # only models whose names contain a word; prints the result

Run it with --write after an upgrade of transformers. For each class, the script writes a tiny random checkpoint, and
loads it as the engine does. The engine compares its logits with those of transformers when it loads a model. The result
is the table in quire_spec/model/transformers.
"""

import argparse
import inspect
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.transformers.causal_lm import TransformersForCausalLM
from quire_kernels import ModuleSlots
from quire_spec.errors import ConfigError
from quire_spec.model.architectures import LLAMA_LINEARS, Architecture, module_name
from quire_spec.model.memory_sizing import linear_sizes
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.transformers import table

TABLE = Path(__file__).parent.parent / "backend/quire_spec/model/transformers/table.py"
SECONDS_PER_MODEL = 60
MAX_PARAMETERS = 20_000_000
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 80,
    "rotary_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of the models, where their configs have these keys. Each size occurs once, so that the features of a linear
layer can be recognized."""
OTHER_SIZES = TINY | {
    "hidden_size": 96,
    "intermediate_size": 176,
    "head_dim": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 56,
    "shared_expert_intermediate_size": 72,
    "n_shared_experts": 2,
}
"""Other sizes, with which a linear layer keeps its kinds of features, unless they were recognized by chance."""
KINDS = ("hidden", "q", "kv", "qkv", "inner", "gate_up", "qkv_by_head", "q_gate", "one")
OPTIONAL_KEYS = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "intermediate_size", "sliding_window")


def build_tiny(kind: Any, values: dict[str, Any]) -> Any:
    """Return a model with tiny sizes; raises the error of the last attempt if there is none."""
    config_kind = kind.config_class
    default = config_kind()
    may_be_null = (
        "n_shared_experts",
        "num_experts_per_tok",
        "n_routed_experts",
        "num_experts",
        "num_local_experts",
        "moe_intermediate_size",
        "pad_token_id",
    )
    known = {
        key: value
        for key, value in values.items()
        if getattr(default, key, None) is not None or (key in may_be_null and hasattr(default, key))
    }
    has_head_dim = "head_dim" in known and not isinstance(getattr(config_kind, "head_dim", None), property)
    derived = known | {"num_attention_heads": 2}
    derived.pop("head_dim", None)
    explicit = known | {"head_dim": values["head_dim"]}
    square = known | {"head_dim": values["hidden_size"] // values["num_attention_heads"]}
    lists = {
        key: [*dict.fromkeys(getattr(default, key)), *getattr(default, key)][: TINY["num_hidden_layers"]]
        for key in ("layer_types", "mlp_layer_types")
        if getattr(default, key, None)
    }
    order = (explicit, square, derived) if has_head_dim else (derived, explicit, square)
    attempts = [
        sizes | changes
        for changes in (lists, {}, lists | {"num_key_value_heads": 2}, {"num_key_value_heads": 2})
        for sizes in order
    ]
    error: Exception | None = None
    for sizes in attempts:
        try:
            config = config_kind(**sizes)
            with torch.device("meta"):
                num_parameters = sum(map(torch.Tensor.numel, kind(config).parameters()))
            if num_parameters > MAX_PARAMETERS:
                raise ValueError(f"{num_parameters} parameters")
            torch.manual_seed(0)
            model = kind(config).float().eval()
            model(input_ids=torch.ones(1, 12, dtype=torch.int64))
        except Exception as failure:  # any error of a class of transformers
            error = failure
        else:
            return model
    assert error is not None
    raise error


def find_row(config: Any, model: torch.nn.Module, architecture: str) -> Architecture:
    """Return the row of the table for a model. Its linear layers have the sizes of TINY."""
    num_layers = config.num_hidden_layers
    path = next(
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
    )
    aliases = {key: name for key, name in type(config).attribute_map.items() if key in (*TINY, *OPTIONAL_KEYS)}
    default = type(config)()
    defaults = {key: getattr(default, key, None) for key in OPTIONAL_KEYS}
    defaults = {key: value for key, value in defaults.items() if type(value) in (int, bool)}
    if defaults.get("num_key_value_heads") == default.num_attention_heads:
        del defaults["num_key_value_heads"]
    if "num_key_value_heads" not in vars(default):
        defaults.pop("num_key_value_heads", None)
    source = inspect.getsource(sys.modules[type(model).__module__])
    ignored = tuple(
        key
        for key in ("num_key_value_heads", "head_dim")
        if not hasattr(default, key) and f'config, "{key}"' not in source and f"config.{key}" not in source
    )
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    parent = path.rpartition(".")[0]
    row = Architecture(
        config.model_type,
        "transformers.causal_lm",
        {},
        path,
        aliases,
        defaults,
        ignored,
        embedding=embedding.removeprefix(f"{parent}."),
    )
    table.SERVED[architecture] = row
    shape = _read_config(config, architecture)
    kinds = linear_sizes_by_kind(shape)
    layers = model.get_submodule(path)
    found = [
        {
            name: LLAMA_LINEARS[name]
            if name in LLAMA_LINEARS and _has_sizes(module, LLAMA_LINEARS[name], shape)
            else (kinds.get(module.in_features), kinds.get(module.out_features))
            for name, module in layer.named_modules()
            if type(module) is torch.nn.Linear and ".experts." not in f".{name}."
        }
        for layer in layers
    ]
    linears = {
        name: pair
        for name, pair in found[0].items()
        if None not in pair and all(each.get(name) == pair for each in found)
    }
    names = Counter(map(module_name, linears))
    linears = {name: pair for name, pair in linears.items() if names[module_name(name)] == 1}
    other = build_tiny(type(model), OTHER_SIZES)
    table.SERVED[architecture] = replace(row, linears=linears)
    sizes = linear_sizes(_read_config(other.config, architecture))
    others = {name: other.get_submodule(f"{path}.0.{name}") for name in linears}
    linears = {
        name: pair
        for name, pair in linears.items()
        if sizes[name] == (others[name].in_features, others[name].out_features)
    }
    return replace(row, linears=linears)


def _read_config(config: Any, architecture: str) -> ModelConfig:
    values = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    return ModelConfig.from_config(values, "transformers")


def _has_sizes(module: torch.nn.Linear, kinds: tuple[str, str], shape: ModelConfig) -> bool:
    table.SERVED[shape.architecture] = Architecture("", "", {"x": kinds})
    return linear_sizes(shape)["x"] == (module.in_features, module.out_features)


def linear_sizes_by_kind(shape: ModelConfig) -> dict[int, str]:
    """Return the kind of features for each size of TINY."""
    probe = {kind: (kind, kind) for kind in KINDS}
    table.SERVED[shape.architecture] = Architecture("", "", probe)
    return {size: kind for kind, (size, _) in reversed(linear_sizes(shape).items())}


def examine(architecture: str) -> tuple[Architecture | None, str]:
    """Return the row of a model and an empty text, or None and the reason why it cannot be served."""
    kind = getattr(transformers, architecture, None)
    if kind is None:
        return None, f"transformers {transformers.__version__} does not export its class"
    default = kind.config_class()
    if getattr(kind, "_is_stateful", False):
        return None, "some of its layers have states instead of keys and values"
    if any(re.match(r"conv_|mamba_|ssm_|linear_num_", key) for key in vars(default)):
        return None, "some of its layers can have states instead of keys and values"
    if getattr(default, "is_decoder", True) is False and hasattr(default, "type_vocab_size"):
        return None, "it is an encoder, whose attention is not causal"
    if others := sorted({*(getattr(default, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}):
        return None, f"some of its layers are of the kind {others[0]}"
    if getattr(default, "is_encoder_decoder", False):
        return None, "it is a part of an encoder-decoder model"
    if any(getattr(default, f"{name}_config", None) is not None for name in ("vision", "audio", "vq")):
        return None, "it reads images or sound"
    if getattr(default, "kv_lora_rank", None):
        return None, "it has latent attention, whose keys and values have sizes of their own"
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        try:
            model = build_tiny(kind, TINY)
            config = model.config
            config.architectures = [architecture]
            if not model._can_set_attn_implementation():
                return None, "its attention does not call the attention functions of transformers"
            for tensor in model.state_dict().values():
                if tensor.is_floating_point() and (tensor.dim() < 2 or len(tensor.unique()) == 1):
                    tensor.add_(torch.randn_like(tensor) * 0.3)
                elif tensor.is_floating_point():
                    tensor.mul_(4.0)
            model.save_pretrained(folder)
        except Exception as error:
            return None, f"no tiny checkpoint: {type(error).__name__}: {error}"
        try:
            row = find_row(config, model, architecture)
        except ConfigError as error:
            return None, str(error)
        except Exception as error:
            return None, f"its layers cannot be found: {type(error).__name__}: {error}"
        table.SERVED[architecture] = row
        try:
            shape = ModelConfig.load(folder, "transformers")
            loaded = TransformersForCausalLM(shape, ParamFactory(torch.float32, torch.device("cpu")))
            for _, linear in loaded.linears():
                linear.adapters = ModuleSlots.__new__(ModuleSlots)  # so that the check includes the rows of its input
            loaded.load(folder)
        except ConfigError as error:
            return None, str(error)
    return row, ""


def _examine_in_child(architecture: str) -> tuple[Architecture | None, str]:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=_send, args=(sender, architecture))
    process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS_PER_MODEL):
            process.kill()
            return None, "timeout"
        return receiver.recv()
    except EOFError:
        return None, "its process ended"
    finally:
        process.join()


def _send(sender: Any, architecture: str) -> None:
    torch.set_num_threads(1)
    try:
        row, reason = examine(architecture)
        # Mappings that are proxies cannot be pickled.
        sender.send((row, reason))
    except Exception as error:
        sender.send((None, f"{type(error).__name__}: {error}"))


def render(results: Mapping[str, tuple[Architecture | None, str]]) -> str:
    """Return the source of the table."""
    version = ".".join(transformers.__version__.split(".")[:2])
    served = [f"    {name!r}: {_render_row(row)}," for name, (row, _) in sorted(results.items()) if row is not None]
    refused = [
        f"    {name!r}: {_reason(name, text)!r}," for name, (row, text) in sorted(results.items()) if row is None
    ]
    return "\n".join(
        [_HEAD.format(version=version), *served, "}", _SERVED_DOC, _REFUSED_HEAD, *refused, "}", _REFUSED_DOC]
    )


def _render_row(row: Architecture) -> str:
    arguments = [repr(row.model_type)]
    if row.linears != LLAMA_LINEARS:
        arguments.append(f"linears={dict(row.linears)!r}")
    for name in ("layers_path", "embedding", "key_aliases", "defaults", "ignored_keys"):
        value, usual = getattr(row, name), getattr(Architecture("", ""), name)
        if value != usual:
            arguments.append(f"{name}={value!r}")
    return f"_row({', '.join(arguments)})"


def _reason(name: str, text: str) -> str:
    """Return the reason for a message: one clause, without the name of the class."""
    text = text.partition("\n")[0].removeprefix(f"model_impl: transformers cannot serve {name}: ")
    if "IdentityModel" in text:
        return "its output projection reads more than the hidden states"
    if re.match(r"layer \d+ has \d+ heads", text):
        return "its keys and values do not have the sizes that config.json implies"
    if text.startswith("its embedding has the shape"):
        return "its embedding does not have the size that config.json implies"
    if text.startswith("tie_word_embeddings"):
        return "it ignores tie_word_embeddings"
    if text.startswith(("no tiny", "timeout", "its layers cannot be found")):
        return "it could not be tested with a tiny checkpoint"
    if "Error:" in text or "cannot be replaced" in text:
        return "its modules cannot be replaced"
    return text


_HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""Which models of transformers can be served with model_impl transformers. Generated by hack/transformers_models.py.

The script has loaded a random checkpoint of every class for generating text, and compared its logits.
"""

from collections.abc import Mapping
from typing import Any

from quire_spec.model.architectures import LLAMA_LINEARS, Architecture

VERSION = "{version}"
"""Version of transformers that was tested."""


def _row(model_type: str, linears: Mapping[str, tuple[str, str]] = LLAMA_LINEARS, **fields: Any) -> Architecture:
    return Architecture(model_type, "transformers.causal_lm", linears, **fields)


SERVED: Mapping[str, Architecture] = {{'''
_SERVED_DOC = '''"""Rows for `ModelConfig.architecture_info`. `linears` are those that adapters can change.
"""'''
_REFUSED_HEAD = "REFUSED: Mapping[str, str] = {"
_REFUSED_DOC = '''"""Why a class cannot be served.
"""
'''


def main() -> None:
    """Examine the models that the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    results = {}
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        for architecture in (names,) if isinstance(names, str) else names:
            if args.word.lower() in architecture.lower() and architecture not in results:
                row, reason = results[architecture] = _examine_in_child(architecture)
                print(architecture, "served" if row else f"refused: {reason[:300]}", flush=True)
                if row is not None and args.word:
                    print(row)
    print(sum(row is not None for row, _ in results.values()), "of", len(results), file=sys.stderr)
    if args.write:
        TABLE.write_text(render(results))
        subprocess.run(["ruff", "format", TABLE], check=True)


if __name__ == "__main__":
    main()
