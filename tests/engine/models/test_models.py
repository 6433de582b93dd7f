# SPDX-License-Identifier: Apache-2.0
"""Model definitions are complete and give the logits of transformers in float32."""

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.caches import create_cache
from support.requirements_of_machine import requires_native_kernels
from support.tiny_checkpoints import (
    BASE,
    CHECKPOINTS,
    LLAMA3_ROPE,
    TRANSFORMERS_CHECKPOINTS,
    VOCAB,
    YARN_ROPE,
    load_oracle,
    make_checkpoint,
    make_initial_model,
    trained_tensors,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire_engine.models.base import CausalLM
from quire_engine.models.forward_batch import build_forward_batch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.moe import MoE
from quire_engine.models.layers.rotary import inverse_frequencies
from quire_engine.models.registry import get_model_class
from quire_engine.sequence import Sequence, SlotId
from quire_engine.step.input import build_step_input
from quire_engine.step.plan import ScheduledSpan
from quire_engine.weights.param_shard import unsharded
from quire_kernels import LoRASlots, LoRATarget, QuantizedWeight, cpu_native
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError
from quire_spec.model.architectures import ARCHITECTURES
from quire_spec.model.capabilities import SUPPORTED_ARCHITECTURES
from quire_spec.model.memory_sizing import weights_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.transformers import table

CPU = torch.device("cpu")
MAX_LOGIT_ERROR = 2e-5
"""In float32, relative to the largest logit."""


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=[*CHECKPOINTS, *TRANSFORMERS_CHECKPOINTS])
def any_folder(request, tmp_path_factory):
    """A checkpoint of a class of Quire, or of a class of transformers."""
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def _load(folder, dtype=torch.float32, quantization=None, model_impl="auto"):
    shape = ModelConfig.load(folder, model_impl)
    factory = ParamFactory(dtype, CPU, quantization=quantization)
    model = get_model_class(shape.architecture, shape.model_impl)(shape, factory)
    model.load(folder)
    return model


def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path):
    folder = make_checkpoint(tmp_path, "glm4_moe")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}, file)
    _load(folder)
    save_file(load_file(file) | {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}, file)
    with pytest.raises(ConfigError, match=r"model\.layers\.4\.eh_proj\.weight is unexpected"):
        _load(folder)


def _logits(model, batch, kv):
    return model.compute_logits(model(batch, kv), batch)


def _batch(model, spans, kv):
    num_groups = kv.layout.num_groups
    if num_groups > 1:
        for span in spans:
            blocks = span.sequence.block_table
            span.sequence.block_table = [block * num_groups + i for block in blocks for i in range(num_groups)]
    step_input = build_step_input(spans, 8, model.shape.long_rope_threshold, num_groups=num_groups)
    return build_forward_batch(step_input, kv, CPU)


def _span(tokens, start, length, first_block, block_size):
    sequence = Sequence(0, tokens, SamplingParams(), seed=0, max_output_tokens=1)
    sequence.state_row = first_block
    sequence.block_table = list(range(first_block, first_block + -(-len(tokens) // block_size)))
    return ScheduledSpan(sequence, start, length, None)


def test_the_table_of_transformers_is_that_of_the_installed_version():
    """After an upgrade, hack/transformers_models.py --write finds out what can be served."""
    assert transformers.__version__.startswith(f"{table.VERSION}.")
    assert all(hasattr(transformers, name) for name in table.SERVED)


def test_every_row_of_transformers_is_computed_by_one_of_its_classes():
    for kind, overrides in TRANSFORMERS_CHECKPOINTS.values():
        assert kind(**(BASE | overrides)).model_type not in {info.model_type for info in ARCHITECTURES.values()}


def test_every_supported_architecture_has_a_class_and_a_parity_row():
    assert all(issubclass(get_model_class(name), CausalLM) for name in SUPPORTED_ARCHITECTURES)
    tested = {kind(**(BASE | overrides)).model_type for kind, overrides in CHECKPOINTS.values()}
    assert tested == {ARCHITECTURES[name].model_type for name in SUPPORTED_ARCHITECTURES}


def test_named_tensors_cover_every_parameter_once(folder):
    model = _load(folder)
    assert sum(tensor.nbytes for _, tensor in model.tensors()) == model.num_bytes
    tensors = {name: unsharded(target).tensor for name, target in model.tensors()}
    matrices = [tensor for name, tensor in tensors.items() if tensor.dim() > 1 and not name.endswith("bias")]
    assert sum(tensor.nbytes for tensor in matrices) == weights_bytes(model.shape, 4)


def _prompts():
    return [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(1)).tolist() for n in (33, 7, 16)]


@torch.inference_mode()
def test_logits_equal_transformers(any_folder):
    model, prompts = _load(any_folder), _prompts()
    oracle = load_oracle(any_folder)
    kv = create_cache(model, 12)
    firsts = (0, 5, 6)
    spans = [_span(p, 0, len(p), first, 8) for p, first in zip(prompts, firsts, strict=True)]
    logits = _logits(model, _batch(model, spans, kv), kv)
    for row, prompt in zip(logits, prompts, strict=True):
        expected = oracle(torch.tensor([prompt])).logits[0, -1]
        assert (row - expected).abs().max() < MAX_LOGIT_ERROR * expected.abs().max()


@torch.inference_mode()
def test_logits_depend_on_every_tensor(any_folder):
    """Without this, the comparison above could hide that a model ignores a tensor."""
    oracle, ids = load_oracle(any_folder), torch.tensor(_prompts()[:1])
    initial = trained_tensors(make_initial_model(oracle.config, seed=0))
    expected = oracle(ids).logits[0, -1]
    unused = []
    for name, tensor in trained_tensors(oracle).items():
        drawn = tensor.clone()
        tensor.copy_(initial[name])
        change = (oracle(ids).logits[0, -1] - expected).abs().max()
        tensor.copy_(drawn)
        if change < 10 * MAX_LOGIT_ERROR * expected.abs().max():
            unused.append(name)
    last = ModelConfig.load(any_folder).num_layers - 1
    without_effect = [f"layers.{last}.layer_scalar"]  # the final norm divides by it
    if oracle.config.model_type in ("opt", "biogpt"):
        # Without rotary positions, a bias of all keys of a head does not change its attention.
        without_effect.append("k_proj.bias")
    assert [name for name in unused if not name.endswith(tuple(without_effect))] == []


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_exact_as_transformers(any_folder, dtype):
    # Enough prompts that one lucky rounding does not decide.
    prompts = torch.randint(0, VOCAB, (24, 32), generator=torch.Generator().manual_seed(1))
    exact = load_oracle(any_folder)(prompts).logits[:, -1]
    transformers_error = load_oracle(any_folder, dtype)(prompts).logits[:, -1].float() - exact
    model = _load(any_folder, dtype)
    model.pack()
    kv = create_cache(model, 24 * 4, dtype)
    spans = [_span(prompt, 0, 32, 4 * i, 8) for i, prompt in enumerate(prompts.tolist())]
    logits = _logits(model, _batch(model, spans, kv), kv)
    assert logits.dtype == dtype
    errors, transformers_errors = (each.norm(dim=1) for each in (logits.float() - exact, transformers_error))
    # A rounded score can choose another expert, so that the error of a single prompt is much larger, here or there.
    mean = torch.median if model.shape.moe is not None else torch.norm
    assert mean(errors) < 1.3 * mean(transformers_errors)


ROUTED = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "ernie4_5_moe",
    "nemotron_h",
    "minimax_m2",
    "qwen3_moe",
)


@torch.inference_mode()
@pytest.mark.parametrize("name", ROUTED)
def test_routers_are_as_exact_as_those_of_transformers(tmp_path, name):
    """In bfloat16, some routers of transformers compute in float32."""
    oracle, seen = load_oracle(make_checkpoint(tmp_path, name), torch.bfloat16), []
    for module in oracle.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda *args: seen.append(args))
    oracle(torch.randint(0, VOCAB, (1, 64), generator=torch.Generator().manual_seed(1)))
    model = _load(tmp_path, torch.bfloat16)
    model.pack()
    routers = [module for layer in model.layers for module in vars(layer).values() if isinstance(module, MoE)]
    assert len(routers) == len(seen) > 0
    for moe, (theirs, (x, *_), outputs) in zip(routers, seen, strict=True):
        x = x.flatten(0, -2)
        exact = x.float() @ theirs.weight.float().T
        logits = next(each for each in ([outputs] if isinstance(outputs, torch.Tensor) else outputs))
        ours = moe.router.compute_logits(x, None)[:, : exact.shape[1]]  # the batch is read for adapters
        error, expected = ((each.float().reshape(exact.shape) - exact).abs().max() for each in (ours, logits))
        assert (error < 1e-4) == (expected < 1e-4), (error, expected)


FUSED = ("llama-biases", "llama-head_dim", "qwen2", "qwen2-windows", "phi3", "phi3-partial", "qwen3-windows")


@torch.inference_mode()
@requires_native_kernels
@pytest.mark.parametrize(
    ("name", "quantization"),
    [(name, None) for name in [*FUSED, "llama-relu", "gemma2"]] + [(FUSED[0], "int8"), (FUSED[0], "int4")],
)
def test_fused_decoder_gives_the_same_bits(name, quantization, tmp_path, monkeypatch):
    monkeypatch.setitem(BASE, "intermediate_size", 128)
    monkeypatch.setattr(cpu_native, "has_fast_gemm", lambda: True)
    model = _load(make_checkpoint(tmp_path, name), torch.bfloat16, quantization)
    targets = [LoRATarget(linear.in_features, tuple(linear.slices.values())) for _, linear in model.linears()]
    slots = LoRASlots(targets, 3, 8, torch.empty(0, dtype=torch.bfloat16))
    for slot, share in enumerate((1.0, 0.5)):
        pairs = [[_pair(target, width, share) for width in target.widths] for target in targets]
        # The second adapter also transforms the products of some modules, with matrices and without.
        transforms = [[_transform(width, 1 - share) for width in target.widths] for target in targets]
        slots.write(slot, slots.pack(pairs, transforms))
    for (_, linear), module in zip(model.linears(), slots.modules, strict=True):
        linear.adapters = module
    model.pack()
    fused_decoder = model.fused_decoder
    assert (fused_decoder is not None) == (name in FUSED)
    if fused_decoder is None:
        return
    for slot_ids in ([None, None, None], [SlotId(0), None, SlotId(1)]):
        logits = []
        for model.fused_decoder in (fused_decoder, None):
            kv = create_cache(model, 41, torch.bfloat16)
            assert fused_decoder.supports(torch.zeros(1, model.shape.hidden_size, dtype=torch.bfloat16), kv.layers)
            # More rows than the fused decoder computes at once, then one decoded token of each.
            for starts, lengths in (((0, 0, 0), (290, 7, 16)), ((290, 7, 16), (1, 1, 1))):
                rows = zip(starts, lengths, (0, 37, 38), slot_ids, strict=True)
                tokens = list(range(291))
                spans = [
                    replace(_span(tokens[: start + length], start, length, first, 8), adapter_slot=slot)
                    for start, length, first, slot in rows
                ]
                batch = _batch(model, spans, kv)
                logits.append(_logits(model, batch, kv))
        assert all(torch.equal(a, b) for a, b in zip(logits[:2], logits[2:], strict=True))


@torch.inference_mode()
@requires_native_kernels
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_classes_of_transformers_have_the_same_quantized_weights(quantization, tmp_path, monkeypatch):
    monkeypatch.setitem(BASE, "intermediate_size", 128)
    folder, weights = make_checkpoint(tmp_path, "qwen3"), []
    for model_impl in ("quire", "transformers"):
        model = _load(folder, torch.bfloat16, quantization, model_impl)
        model.pack()
        kv = create_cache(model, 8, torch.bfloat16)
        assert _logits(model, _batch(model, [_span(_prompts()[0], 0, 33, 0, 8)], kv), kv).isfinite().all()
        weights.append([linear.weight for _, linear in model.linears()] + [model.lm_head.weight])
    for native, other in zip(*weights, strict=True):
        assert isinstance(native, QuantizedWeight) and isinstance(other, QuantizedWeight)
        assert native.scheme == other.scheme and torch.equal(native.values, other.values)


def _pair(target, width, share):
    """Return a matrix pair of LoRA rank 3 for a share of the modules, otherwise None."""
    if torch.rand(()) > share:
        return None
    return torch.randn(3, target.in_features) * 0.1, torch.randn(width, 3) * 0.1


def _transform(width, share):
    """Return a transform for a share of the modules, otherwise None."""
    return None if torch.rand(()) >= share else torch.randn(2, width) * 0.1


@torch.inference_mode()
def test_chunk_inside_a_prompt_computes_no_logits(any_folder):
    model = _load(any_folder)
    kv = create_cache(model, 4)
    assert model(_batch(model, [_span(list(range(20)), 0, 9, 0, 8)], kv), kv) is None


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + i / 100 for i in range(64)],
    "long_factor": [1.0 + i / 2 for i in range(64)],
}
SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3_ROPE,
    "llama3, high theta": LLAMA3_ROPE | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192},
    "yarn": YARN_ROPE,
    "yarn, not truncated": YARN_ROPE | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, "factor": 40.0},
    "yarn, scaled": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.5, "original_max_position_embeddings": 4096},
    "longrope": LONG_ROPE,
    "longrope, attention factor": LONG_ROPE | {"attention_factor": 1.5},
    "longrope, factor": LONG_ROPE | {"factor": 7.0},
    "yarn, attention factor": YARN_ROPE | {"attention_factor": 1.5},
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_rope_equals_transformers(scaling):
    config = CHECKPOINTS["llama"][0](
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=scaling
    )
    shape = ModelConfig.from_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    oracle = LlamaRotaryEmbedding(config)
    if shape.long_rope_threshold is not None:
        oracle(torch.empty(1), torch.tensor([[shape.long_rope_threshold]]))
        long = inverse_frequencies(shape.ropes[0], long_rope=True)
        torch.testing.assert_close(long, oracle.inv_freq, rtol=1e-6, atol=0)
        oracle(torch.empty(1), torch.tensor([[shape.long_rope_threshold - 1]]))
    torch.testing.assert_close(inverse_frequencies(shape.ropes[0]), oracle.inv_freq, rtol=1e-6, atol=0)
    assert shape.ropes[0].attention_factor == pytest.approx(oracle.attention_scaling)
