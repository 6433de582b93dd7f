# SPDX-License-Identifier: Apache-2.0
"""Adapters of experts and routers: in one batch, each gives the logits and tokens of an unmerged `PeftModel`."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.near_ties import assert_greedy_tokens, assert_top_tokens
from support.requirements_of_machine import requires_native_kernels
from support.thread_workers import engine_with_thread_workers
from support.tiny_checkpoints import (
    BASE,
    CHECKPOINTS,
    VOCAB,
    load_adapted_oracle,
    load_oracle,
    make_adapter,
    make_checkpoint,
    write_checkpoint,
)

from quire_engine.core.engine import Engine
from quire_engine.lora.peft.adapter import read_adapter
from quire_engine.lora.peft.adapter_tensors import WEIGHTS_FILE
from quire_engine.lora.peft.config import CONFIG_FILE
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument
from quire_spec.model.memory_sizing import lora_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceRequest

NUM_TOKENS = 6
PROMPTS = [[(7 * i + 3 * p) % VOCAB for i in range(5 + 9 * p)] for p in range(3)]
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
ATTENTION = ["q_proj", "o_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "experts": {"target_modules": [], "target_parameters": [GATE_UP, DOWN]},
    "down": {"target_modules": ["v_proj"], "target_parameters": ["experts.down_proj"], "r": 3, "use_rslora": True},
    "gate_up": {"target_modules": [], "target_parameters": ["gate_up_proj"], "r": 1, "lora_alpha": 5},
    "router": {"target_modules": ATTENTION, "target_parameters": ["ROUTER.weight"]},
    "patterns": {
        "target_modules": ATTENTION,
        "target_parameters": [GATE_UP, DOWN, "ROUTER.weight", "k_proj.weight"],
        "rank_pattern": {"gate_up_proj": 5, "k_proj.weight": 2, "ROUTER": 7},
        "alpha_pattern": {r".*\.1\.mlp\.experts\.down_proj": 40, "ROUTER.weight": 3},
    },
    "attention": {"target_modules": ATTENTION},
}
SUMS = {"down and experts": [("down", 0.7), ("experts", -0.4)], "all": [("router", 1.5), ("patterns", 0.3)]}
FAMILIES = ["qwen3_moe", "qwen3_moe-mixed", "mixtral", "gpt_oss"]


def _adapter(checkpoint: Path, folder: Path, seed: int, config: dict[str, Any]) -> Path:
    names = ModelConfig.load(checkpoint).architecture_info.expert_names
    text = json.dumps(config).replace("ROUTER", names.router).replace("mlp.", names.path_of(""))
    text = text.replace(r"mlp\\.", names.path_of("").replace(".", r"\\."))  # in an expression
    config = json.loads(text.replace("gate_up_proj", next(iter(names.adapted_projections)).partition(".")[2]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # PEFT's own patterns for fused experts
        return make_adapter(checkpoint, folder, seed, **config)


def _adapter_by_expert(checkpoint: Path, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write an adapter as trainers that know experts one by one do."""
    shape = ModelConfig.load(checkpoint)
    torch.manual_seed(seed)
    names, inner, hidden = shape.architecture_info.expert_names, shape.moe.intermediate_size, shape.hidden_size
    *inputs, down = names.projections
    hidden_of_experts = shape.moe.latent_size or hidden
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 12, "bias": "none"}
    # If some layers have no experts, or there are shared experts, a list would also name their projections.
    router = names.router.rpartition(".")[2]
    pattern = rf".*(q_proj|{router}|\.experts.*({'|'.join(names.projections)}))"
    is_mixed = not all(shape.moe.layers) or names.shared
    config |= {"target_modules": pattern if is_mixed else ["q_proj", router, *names.projections]} | changes
    tensors = {}

    def add(name: str, d_in: int, d_out: int) -> None:
        rank = config["r"]
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, d_in) * d_in**-0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(d_out, rank) * 0.2

    for layer in range(shape.num_layers):
        block = f"model.layers.{layer}.{names.block}"
        for path in shape.layer_linears(layer):
            if path.endswith("q_proj"):
                add(f"model.layers.{layer}.{path}", hidden, shape.num_heads * shape.head_dim)
        if not shape.has_experts(layer):
            continue
        add(f"{block}.{names.router}", hidden, shape.moe.num_experts)
        for expert in range(shape.moe.num_experts):
            for projection in inputs:
                add(f"{block}.experts.{expert}.{projection}", hidden_of_experts, inner)
            add(f"{block}.experts.{expert}.{down}", inner, hidden_of_experts)
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


def _reads_single_experts(checkpoint: Path) -> bool:
    """Return whether PEFT 0.21 reads tensors of single experts: only for experts with a gate."""
    return sum(map(len, ModelConfig.load(checkpoint).architecture_info.expert_names.adapted_projections.values())) == 3


def _load_oracle(checkpoint: Path, adapter: Path | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return load_oracle(checkpoint) if adapter is None else load_adapted_oracle(checkpoint, adapter)


def _summed_oracle(checkpoint: Path, adapters: dict[str | None, Path | None], parts: list[tuple[str, float]]) -> Any:
    """The base model, to whose weights the changes by each merged adapter are added. PEFT itself cannot add adapters
    of experts."""
    model = load_oracle(checkpoint)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, weight in parts:
            merged = _load_oracle(checkpoint, adapters[name]).merge_and_unload().state_dict()
            for key, tensor in model.state_dict().items():
                tensor += weight * (merged[key] - base[key])
    return model


def _reference(oracle: Any, prompt: list[int], guess: list[int]) -> tuple[list[int], torch.Tensor]:
    """Return the greedy tokens and the log probabilities.

    The oracle verifies all tokens of a guess at once, and generates only if one of them is wrong.
    """
    tokens, tables = list(prompt), []
    with torch.inference_mode():
        table = oracle(torch.tensor([prompt + guess[:-1]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
        if len(guess) == NUM_TOKENS and table.argmax(-1).tolist() == guess:
            return guess, table
        for _ in range(NUM_TOKENS):
            tables.append(oracle(torch.tensor([tokens])).logits[0, -1].log_softmax(-1))
            tokens.append(int(tables[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(tables)


def _config(checkpoint: Path, **changes: Any) -> EngineConfig:
    values = {"model": str(checkpoint), "device": "cpu", "dtype": "float32", "enable_lora": True, "max_model_len": 128}
    values["block_size"] = 8  # divides the chunks of Llama 4
    return EngineConfig.from_json(values | {"max_loras": 8, "max_lora_rank": 16, "lora_experts": True} | changes)


def _outputs(engine: Engine, requests: list[tuple[list[int], str | None]]) -> list[tuple[list[int], list[Any]]]:
    params = SamplingParams.from_mapping({"temperature": 0.0, "max_tokens": NUM_TOKENS, "logprobs": 20})
    outputs: list[tuple[list[int], list[Any]]] = [([], []) for _ in requests]
    for i, (prompt, digest) in enumerate(requests):
        engine.add(SequenceRequest(i, prompt, params, digest, adapter_parts=SUMS.get(str(digest), [])))
    while engine.has_work:
        engine.read_pending_adapters()
        for result in engine.step().results:
            outputs[result.id][0].extend(result.token_ids)
            outputs[result.id][1].extend(result.logprobs)
    return outputs


def _assert_equal_peft(engine: Engine, checkpoint: Path, adapters: dict[str | None, Path | None]) -> None:
    """Compare the base and all adapters in one batch with one PeftModel per adapter."""
    for digest, path in adapters.items():
        if digest is not None and path is not None:
            engine.add_adapter(digest, path, engine.read_adapter(path))
    sums = {name: None for name, parts in SUMS.items() if adapters.keys() >= {part for part, _ in parts}}
    requests = [(prompt, digest) for prompt in PROMPTS for digest in (adapters | sums)]
    outputs = dict(zip(map(str, requests), _outputs(engine, requests), strict=True))
    found = set()
    for digest, path in (adapters | sums).items():
        is_sum = digest in sums
        oracle = _summed_oracle(checkpoint, adapters, SUMS[digest]) if is_sum else _load_oracle(checkpoint, path)
        for prompt in PROMPTS:
            tokens, entries = outputs[str((prompt, digest))]
            expected, tables = _reference(oracle, prompt, tokens)
            num_comparable = assert_greedy_tokens(tokens, expected, tables)
            assert num_comparable > 0
            for each, table in list(zip(entries, tables, strict=True))[:num_comparable]:
                assert_top_tokens([int(entry[0]) for entry in each[1:]], table)
                assert max(abs(entry[1] - table[int(entry[0])].item()) for entry in each) < 1e-4, digest
        outputs_of_adapter = [outputs[str((prompt, digest))] for prompt in PROMPTS]
        found.add(str([(tokens, round(entries[0][0][1], 2)) for tokens, entries in outputs_of_adapter]))
    assert len(found) == len(adapters | sums), "an adapter has no effect, so the test would not notice its absence"


@pytest.mark.parametrize(
    ("name", "max_loras"),
    [
        *((name, max_loras) for name in FAMILIES for max_loras in (8, 2)),
        *(
            (name, 8)
            for name in (
                "glm4_moe",
                "hunyuan_moe",
                "granite4-moe",
                "nemotron_h",
                "nemotron_h-latent",
                "llama4",
                "gemma4-moe",
            )
        ),
    ],
)
def test_adapters_of_experts_equal_peft(name, max_loras, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", name)
    adapters: dict[str | None, Path | None] = {None: None}
    for seed, (kind, config) in enumerate(ADAPTERS.items()):
        adapters[kind] = _adapter(checkpoint, tmp_path / kind, seed, config)
    if _reads_single_experts(checkpoint):
        adapters["by expert"] = _adapter_by_expert(checkpoint, tmp_path / "by expert")
        adapters["all-linear"] = _adapter(checkpoint, tmp_path / "all", 9, {"target_modules": "all-linear", "r": 4})
    _assert_equal_peft(Engine.from_config(_config(checkpoint, max_loras=max_loras)), checkpoint, adapters)


@pytest.mark.parametrize("name", [*FAMILIES, "glm4_moe", "granite4-moe", "nemotron_h", "llama4"])
def test_ranks_of_tensor_parallelism_equal_peft(name, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", name)
    adapters: dict[str | None, Path | None] = {None: None}
    for seed, kind in enumerate(("experts", "patterns")):
        adapters[kind] = _adapter(checkpoint, tmp_path / kind, seed, ADAPTERS[kind])
    if _reads_single_experts(checkpoint):
        adapters["by expert"] = _adapter_by_expert(checkpoint, tmp_path / "by expert")
    engine = engine_with_thread_workers(_config(checkpoint, tensor_parallel_size=2))
    _assert_equal_peft(engine, checkpoint, adapters)


def test_tensors_of_single_experts_without_a_gate(tmp_path):
    """They are the same adapter as the tensors of all experts, which equals PEFT."""
    checkpoint = make_checkpoint(tmp_path / "model", "nemotron_h-latent")
    shape = ModelConfig.load(checkpoint)
    folders = [
        _adapter(checkpoint, tmp_path / layout, 0, {"target_modules": [], "target_parameters": [GATE_UP, DOWN]})
        for layout in ("all", "single")
    ]

    def split(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            block, _, rest = name.partition(".experts.")
            # PEFT wraps the parameters in the order in which the model defines them.
            projection = "up_proj" if rest.startswith("base_layer.") else "down_proj"
            del tensors[name]
            half = name.removesuffix(".weight")[-1]
            by_rank = tensor.unflatten(
                *((0, (shape.moe.num_experts, -1)) if half == "A" else (1, (-1, shape.moe.num_experts)))
            )
            for expert, matrix in enumerate(by_rank.unbind(0 if half == "A" else 2)):
                tensors[f"{block}.experts.{expert}.{projection}.lora_{half}.weight"] = matrix

    _rewrite(folders[1], split, target_parameters=None, target_modules=r".*\.experts\.\d+\.(up|down)_proj")
    stacked, single = (
        read_adapter(folder, shape, 16, torch.float32, has_experts=True, checkpoint=checkpoint) for folder in folders
    )
    assert stacked.pairs.keys() == single.pairs.keys() and len(stacked.pairs) == 2
    for key, pair in stacked.pairs.items():
        assert all(map(torch.equal, pair, single.pairs[key]))


@requires_native_kernels
@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        *((name, quantization) for name in ("qwen3_moe", "gpt_oss") for quantization in (None, "int8", "int4")),
        ("glm4_moe", None),  # whose router is float32
        ("nemotron_h", None),  # whose experts have no gate
        ("nemotron_h", "int8"),
    ],
)
def test_adapters_on_compiled_and_quantized_experts(name, quantization, tmp_path):
    """In bfloat16, an adapter changes the log probabilities as in float32 with the same weights. All experts compute
    each token, because rounding that changes the choice of an expert would change its log probabilities at once."""
    kind, overrides = CHECKPOINTS[name]
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 64, "num_experts_per_tok": 5, "num_local_experts": 5}
    sizes |= {"num_experts": 5, "n_routed_experts": 5, "n_group": 1, "topk_group": 1}
    config = kind(**(BASE | overrides | sizes | {"initializer_range": 0.1}))
    checkpoint = write_checkpoint(tmp_path / "model", config, 0)
    changes = {"target_modules": [], "target_parameters": [GATE_UP, DOWN, "ROUTER.weight"], "lora_alpha": 64}
    adapter = _adapter(checkpoint, tmp_path / "adapter", 0, changes)
    prompt = [(11 * i) % VOCAB for i in range(60)]

    def logprobs(digest: str | None, **changes: Any) -> torch.Tensor:
        engine = Engine.from_config(_config(checkpoint, **changes))
        engine.add_adapter("a", adapter, engine.read_adapter(adapter))
        params = SamplingParams.from_mapping({"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0})
        engine.add(SequenceRequest(0, prompt, params, digest))
        found = []
        while engine.has_work:
            engine.read_pending_adapters()
            found += [entries for result in engine.step().results for entries in result.prompt_logprobs or []]
        return torch.tensor([entries[0][1] for entries in found if entries])

    (base, wanted), (found_base, found) = (
        [logprobs(digest, dtype=dtype, quantization=quantization) for digest in (None, "a")]
        for dtype in ("float32", "bfloat16")
    )
    assert len(found) == 59 and (wanted - base).abs().mean() > 0.3
    error = ((found - found_base) - (wanted - base)).abs().mean()
    # Compiled kernels also quantize the inputs of quantized experts.
    assert error < (0.12 if quantization else 0.03) * (wanted - base).abs().mean()


def _rewrite(folder: Path, change: Any, **config: Any) -> None:
    """Change the tensors and the config of an adapter."""
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def _remove(pattern: str) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if pattern in name]
        assert names
        for name in names:
            del tensors[name]

    return change


def _set(name: str, index: int, value: float) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[index] = value

    return change


def _transpose(tensors: dict[str, torch.Tensor]) -> None:
    """Swap inputs and outputs, as PEFT before 0.19 did."""
    a, b = (f"{STACKED}.base_layer.lora_{half}.weight" for half in "AB")
    tensors[a], tensors[b] = tensors[b].t(), tensors[a].t()


STACKED = "base_model.model.model.layers.1.mlp.experts"
WRONG_STACKED = {
    "a parameter is missing": (
        _remove("base_layer"),
        {},
        "tensors of 1 parameters .* names gate_up_proj and down_proj",
    ),
    "a parameter is not in the config": (lambda _: None, {"target_parameters": [DOWN]}, "2 param.* names down_proj;"),
    "no parameter is in the config": (lambda _: None, {"target_parameters": []}, "2 parameters .* names none"),
    "a layer is missing": (
        _remove("layers.1.mlp"),
        {},
        "target_parameters contains model.layers.1.mlp.experts.gate_up",
    ),
    "B is missing": (_remove("layers.0.mlp.experts.lora_B"), {}, "exists, but its lora_B is missing"),
    "biases": (
        lambda _: None,
        {"target_parameters": [GATE_UP, DOWN, "gate_up_proj_bias"]},
        "'gate_up_proj_bias', which",
    ),
    "magnitudes": (lambda _: None, {"use_dora": True}, "use_dora with experts or target_parameters is not supported"),
    "biases of B": (
        lambda _: None,
        {"lora_bias": True},
        "lora_bias with experts or target_parameters is not supported",
    ),
    "another rank": (lambda _: None, {"r": 4}, "has shape .48, 64.; config and model require .24, 64"),
    "older PEFT": (
        _transpose,
        {},
        r"base_layer.lora_A.weight' has shape \(48, 96\); config and model require \(48, 64",
    ),
    "too large a rank": (lambda _: None, {"r": 32}, "rank 32 exceeds max_lora_rank 16"),
    "NaN": (
        _set(f"{STACKED}.lora_A.weight", 5, float("nan")),
        {},
        "tensors of .*layers.1.mlp.experts.down_proj contain",
    ),
    "an expert diverged": (
        lambda tensors: tensors[f"{STACKED}.lora_B.weight"].view(64, 8, 6)[:, :, 4].fill_(1e4),
        {},
        "Diverged: the rows of the update of model.layers.1.mlp.experts.down_proj have the norm",
    ),
    "a third parameter": (
        lambda tensors: tensors.update(
            {
                n.replace("base_layer", "base_layer.base_layer"): t.clone()
                for n, t in tensors.items()
                if "base_layer" in n
            }
        ),
        {},
        "tensors of 3 parameters",
    ),
}
BY_EXPERT = "model.layers.0.mlp.experts.{}.{}_proj"
WRONG_BY_EXPERT = {
    "an expert is missing": (_remove("layers.1.mlp.experts.5.down"), {}, "no tensors for .*experts.5.down_proj"),
    "A is missing": (_remove("layers.1.mlp.experts.5.down_proj.lora_A"), {}, "exists, but its lora_A is missing"),
    "up is missing": (_remove("up_proj"), {}, "of gate_proj for experts, but none of up_proj"),
    "down is missing": (_remove("layers.0.mlp.experts.5.down"), {}, "no tensors for .*experts.5.down_proj"),
    "all of down is missing": (
        _remove("down_proj"),
        {},
        "target_modules contains down_proj, but layer 0 has no tensors",
    ),
    "no expert": (_remove("experts"), {}, "target_modules contains (gate|up)_proj, but layer 0 has no tensors"),
    "no gate and up": (
        lambda t: [t.pop(n) for n in [*t] if "layers.1" in n and ("up_proj" in n or "gate_proj" in n)],
        {},
        "target_modules contains gate_proj, but layer 1 has no tensors",
    ),
    "another scale": (
        lambda _: None,
        {"use_rslora": True},
        "use_rslora with tensors of gate_proj and up_proj for each",
    ),
    "a rank for an expert": (
        lambda _: None,
        {"rank_pattern": {"0.up_proj": 2}},
        "rank_pattern and .* of single experts",
    ),
    "a scale for experts": (lambda _: None, {"alpha_pattern": {".*": 2}}, "alpha_pattern of single experts"),
    "excluded": (lambda _: None, {"exclude_modules": ["up_proj"]}, "up_proj, which exclude_modules excludes"),
    "not a target": (lambda _: None, {"target_modules": ["q_proj", "gate"]}, "which target_modules excludes"),
    "another router": (
        lambda _: None,
        {"target_modules": r".*(q|gate|up|down)_proj"},
        "mlp.gate, which target_modules",
    ),
    "a rank": (lambda _: None, {"r": 16}, r"rank 32 exceeds max_lora_rank 16; .*gate and up are fused"),
    "a shape": (
        lambda t: t.update({n: v[:-1] for n, v in t.items() if "experts.3.up_proj.lora_B" in n}),
        {},
        "has shape",
    ),
    "magnitudes": (lambda _: None, {"use_dora": True}, "use_dora with experts or target_parameters is not supported"),
    "an invocation": (lambda _: None, {"alora_invocation_tokens": [5]}, "alora_invocation_tokens with experts or"),
    "magnitudes of a router": (
        lambda t: t.update({f"{STACKED.replace('experts', 'gate')}.lora_magnitude_vector": torch.ones(6)}),
        {"use_dora": True},
        "magnitudes and biases of routers are not supported",
    ),
    "an expert too many": (
        lambda t: t.update({n.replace("experts.0", "experts.6"): v.clone() for n, v in t.items()}),
        {},
        "is a mixture of experts, and an adapter can change its modules self_attn.q_proj",
    ),
    "both layouts": (
        lambda t: t.update({f"{STACKED}.lora_{half}.weight": torch.ones(8, 8) for half in "AB"}),
        {},
        "tensors for each expert of layer 1, and also",
    ),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


@pytest.mark.parametrize(("change", "config", "error"), WRONG_STACKED.values(), ids=WRONG_STACKED)
def test_wrong_tensors_of_parameters_are_rejected(change, config, error, mixture, tmp_path):
    folder = _adapter(mixture, tmp_path / "adapter", 0, ADAPTERS["experts"])
    shape = ModelConfig.load(mixture)
    assert read_adapter(folder, shape, 16, torch.float32, has_experts=True)
    _rewrite(folder, change, **config)
    with pytest.raises(InvalidArgument, match=error):
        read_adapter(folder, shape, 16, torch.float32, has_experts=True)


@pytest.mark.parametrize(("change", "config", "error"), WRONG_BY_EXPERT.values(), ids=WRONG_BY_EXPERT)
def test_wrong_tensors_of_single_experts_are_rejected(change, config, error, mixture, tmp_path):
    folder, shape = _adapter_by_expert(mixture, tmp_path / "adapter"), ModelConfig.load(mixture)
    assert read_adapter(folder, shape, 8, torch.float32, has_experts=True).rank == 8
    _rewrite(folder, change, **config)
    with pytest.raises(InvalidArgument, match=error):
        read_adapter(folder, shape, 16, torch.float32, has_experts=True)


def test_only_the_setting_reserves_memory_for_experts(mixture, tmp_path):
    shape = ModelConfig.load(mixture)
    engines = {on: Engine.from_config(_config(mixture, lora_experts=on)) for on in (False, True)}
    for on, engine in engines.items():
        # The router needs whole panels only with compiled kernels, which are not used in float32.
        assert 0 <= lora_bytes(shape, 8 * 16, 4, on) - engine.memory.lora_bytes <= 8 * 2 * 16 * 4 * 32
    assert engines[False].memory.lora_bytes < engines[True].memory.lora_bytes / 2
    experts = _adapter(mixture, tmp_path / "experts", 0, ADAPTERS["experts"])
    with pytest.raises(InvalidArgument, match=r"changes experts .*layers.0.mlp.experts.*; set lora_experts .*to true"):
        engines[False].read_adapter(experts)
    router = _adapter(mixture, tmp_path / "router", 0, ADAPTERS["router"])
    packed = [engine.read_adapter(router).info.num_bytes for engine in engines.values()]
    assert packed[0] == pytest.approx(packed[1], rel=0.1)
    _assert_equal_peft(engines[False], mixture, {None: None, "router": router})
