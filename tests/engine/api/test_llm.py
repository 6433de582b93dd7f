# SPDX-License-Identifier: Apache-2.0
"""Offline generation equals transformers and peft through vLLM's API, with any engine settings."""

import copy
import functools
import gc
import math
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from support.near_ties import assert_top_tokens
from support.tiny_checkpoints import make_checkpoint

import quire_engine
from quire_engine import LLM, LoRARequest, SamplingParams, TextPrompt, TokensPrompt
from quire_engine.api.llm import Engine
from quire_spec.errors import ConfigError, Internal, InvalidArgument

# peft reads an attribute that transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
TEXTS = ["the quick brown fox", "jumps", "over the lazy dog and back again, twice", "a", "the quick brown cat"]
NAMES: list[str | None] = ["a", None, "b", "a", "b"]


def test_names_are_imported_on_first_use() -> None:
    script = (
        "import sys, quire_engine, quire_engine.tokenization.tokenizer, quire_engine.core.engine; assert 'torch' not "
        "in sys.modules; "
        "assert quire_engine.SamplingParams(top_k=3).top_k == 3 and quire_engine.LLM; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert all(getattr(quire_engine, name) for name in quire_engine.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LLN'"):
        _ = quire_engine.LLN


def test_batch_equals_transformers_in_prompt_order(models: Any) -> None:
    outputs = models.llm.generate(TEXTS, GREEDY)
    assert [output.prompt for output in outputs] == TEXTS
    for output in outputs:
        [completion] = output.outputs
        assert output.prompt_token_ids == models.llm.tokenizer.encode(output.prompt)
        assert completion.token_ids == models.expected(output.prompt_token_ids)
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        assert output.finished and completion.finished()
        assert (completion.cumulative_logprob, completion.logprobs) == (None, None)
    ids = [int(output.request_id) for output in outputs]
    assert ids == sorted(set(ids))


def test_adapters_in_one_batch_equal_peft(models: Any) -> None:
    outputs = models.llm.generate(TEXTS, GREEDY, lora_request=[models.lora(name) for name in NAMES])
    for name, output in zip(NAMES, outputs, strict=True):
        assert output.outputs[0].token_ids == models.expected(output.prompt_token_ids, name)
        assert output.lora_request == models.lora(name)


def test_prompt_formats_are_equivalent(models: Any) -> None:
    ids = models.llm.tokenizer.encode("jumps")
    plain: list[Any] = ["jumps", {"prompt": "jumps"}, {"prompt_token_ids": ids}, ids]
    typed = [TextPrompt(prompt="jumps"), TokensPrompt(prompt_token_ids=ids, prompt="jumps")]
    together = models.llm.generate([*plain, *typed], GREEDY)
    alone = [models.llm.generate(prompt, GREEDY)[0] for prompt in plain]
    assert {tuple(o.outputs[0].token_ids) for o in [*together, *alone]} == {tuple(models.expected(ids))}
    assert [output.prompt for output in together] == ["jumps", "jumps", None, None, "jumps", "jumps"]
    assert models.llm.generate([]) == []


def test_parameters_are_assignable_and_token_ids_can_be_arrays(models: Any) -> None:
    params = models.llm.get_default_sampling_params()
    params.max_tokens, params.temperature = 5, 0
    ids = torch.tensor([5, 9, 9, 30])
    for prompt in ([ids], [ids.numpy()], ids.numpy()):
        [output] = models.llm.generate(prompt, params)
        assert output.outputs[0].token_ids == models.expected(ids.tolist(), max_new_tokens=5)
        assert repr(output.outputs[0].finish_reason) == "'length'"
    params.n = 2
    with pytest.raises(InvalidArgument, match="'n': must be 1 with temperature 0"):
        models.llm.generate("jumps", params)


def test_lora_request_has_the_fields_of_vllm() -> None:
    lora = LoRARequest(lora_name="sql", lora_int_id=3, lora_path="/x")
    assert (lora.name, lora.adapter_id, lora.path) == ("sql", 3, "/x")
    ignored = LoRARequest("sql", 3, "/x", base_model_name="m", load_inplace=True, long_lora_max_len=None)
    assert lora == ignored == LoRARequest("sql", 3, "/x") and len({lora, LoRARequest("sql", 3, "/x")}) == 1


def test_parameters_survive_copies_and_pickles() -> None:
    params = SamplingParams(stop=["a"], logit_bias={3: 1.5}, n=2, seed=7)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == replace(params) == params


def test_parameters_per_prompt_and_by_default(models: Any) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (3, 7)]
    outputs = models.llm.generate(["jumps", "jumps"], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 7]
    [default] = models.llm.generate("jumps")
    assert len(default.outputs[0].token_ids) == 16
    limited = models.llm.generate([5] * 120, SamplingParams(max_tokens=None))
    assert len(limited[0].outputs[0].token_ids) == 8 and limited[0].outputs[0].finish_reason == "length"


def test_logprobs_equal_transformers(models: Any) -> None:
    [output] = models.llm.generate(TEXTS[0], SamplingParams(temperature=0.0, max_tokens=5, logprobs=2))
    [completion] = output.outputs
    ids = torch.tensor([output.prompt_token_ids + completion.token_ids])
    with torch.inference_mode():
        expected = models.references[None](ids).logits[0].log_softmax(-1)
    assert completion.logprobs is not None and completion.cumulative_logprob is not None
    for i, (token, entries) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        row = expected[len(output.prompt_token_ids) + i - 1]
        assert_top_tokens(list(entries), row)
        assert next(iter(entries)) == token and entries[token].rank == 1
        assert entries[token].decoded_token == models.llm.tokenizer.token_text(token)
        for token_id, entry in entries.items():
            assert math.isclose(entry.logprob, row[token_id], abs_tol=1e-4)
    total = sum(
        entries[token].logprob for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert math.isclose(completion.cumulative_logprob, total)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_stop_reason_is_the_stop_string_or_stop_token(models: Any, async_scheduling: bool) -> None:
    llm = models.load(async_scheduling=True) if async_scheduling else models.llm
    [free] = llm.generate(TEXTS[0], GREEDY)
    text, tokens = free.outputs[0].text, free.outputs[0].token_ids
    stop = text[4:6]
    [by_string] = llm.generate(TEXTS[0], SamplingParams(temperature=0.0, max_tokens=24, stop=("\0no", stop)))
    completion = by_string.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (
        text[: text.index(stop)],
        "stop",
        stop,
    )
    assert completion.token_ids == tokens[: len(completion.token_ids)] and len(completion.token_ids) < len(tokens)
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(tokens[5],))
    [by_token] = llm.generate(TEXTS[0], params)
    end = tokens.index(tokens[5]) + 1
    assert by_token.outputs[0].token_ids == tokens[:end]
    assert (by_token.outputs[0].finish_reason, by_token.outputs[0].stop_reason) == ("stop", tokens[5])
    # With min_tokens the stop token is not sampled before that.
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(tokens[5],), min_tokens=10)
    [later] = llm.generate(TEXTS[0], params)
    assert len(later.outputs[0].token_ids) > 10 and tokens[5] not in later.outputs[0].token_ids[:10]
    assert not llm.engine.has_work


def test_model_without_tokenizer_uses_token_ids(models: Any, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bare", "llama")
    llm = LLM(model=folder, dtype="float32", max_model_len=64, kv_cache_memory_bytes=2**21)
    [output] = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0.0, max_tokens=4, logprobs=0))
    assert output.outputs[0].token_ids == models.expected([1, 2, 3], max_new_tokens=4)
    assert output.outputs[0].text == ""
    assert output.outputs[0].logprobs is not None
    assert all(entry.decoded_token is None for p in output.outputs[0].logprobs for entry in p.values())
    with pytest.raises(InvalidArgument, match=r"has no tokenizer; give prompt_token_ids"):
        llm.generate("text")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": ["a", {"text": "a"}]}, "unknown key 'text'"),
        ({"prompts": ["a", {}]}, "must contain 'prompt' .text. or 'prompt_token_ids'"),
        ({"prompts": ["a", [1] * 128]}, "the prompt has 128 tokens and max_model_len is 128"),
        (
            {"prompts": ["a", "b"], "sampling_params": [SamplingParams()]},
            "sampling_params: got 1 entries for 2 prompts",
        ),
        ({"prompts": ["a", "b"], "lora_request": [None]}, "lora_request: got 1 entries for 2 prompts"),
        ({"prompts": "a", "lora_request": LoRARequest("x", 1, "/nowhere")}, "adapter 'x': .*No such file"),
        ({"prompts": "a", "lora_request": LoRARequest("x", 1, "~nobody!/x")}, "adapter 'x': .*home directory"),
        ({"prompts": "a", "lora_request": "x"}, "lora_request: must be of type LoRARequest, got 'x'"),
        (
            {"prompts": "a", "sampling_params": {"temperature": 0}},
            "sampling_params: must be of type SamplingParams, got .*temperature",
        ),
        ({"prompts": "a", "priority": ["1"]}, "priority: must be of type int, got '1'"),
        ({"prompts": None}, "prompts: invalid prompt None; use a text"),
        ({"prompts": ["a", None]}, "prompt: invalid prompt 'None'; use a text"),
        ({"prompts": {"prompt_token_ids": "abc"}}, "prompt: invalid prompt 'abc'; use a text"),
        ({"prompts": [["a", "b"]]}, "prompt: must be a list of token ids"),
        ({"prompts": [[1, -2]]}, "prompt: -2 is not a token id"),
        ({"prompts": [[1, 2**70]]}, "prompt: 1180591620717411303424 is not a token id"),
    ],
)
def test_invalid_request_is_rejected_before_anything_runs(models: Any, arguments: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        models.llm.generate(**arguments)
    assert not models.llm.engine.has_work
    models.llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("field", "value"), [("lora_name", ["x"]), ("lora_int_id", "1"), ("lora_path", None), ("lora_path", {"a": 1})]
)
def test_lora_request_fields_of_wrong_type_are_rejected(field: str, value: Any) -> None:
    fields: dict[str, Any] = {"lora_name": "x", "lora_int_id": 1, "lora_path": "/x"}
    with pytest.raises(InvalidArgument, match=f"lora_request: {field} has the wrong type {type(value).__name__}"):
        LoRARequest(**fields | {field: value})


@pytest.mark.parametrize("model", ["~nobody!/model", "a" * 5000])
def test_invalid_model_path_is_reported(model: str) -> None:
    with pytest.raises(ConfigError, match=f"model: '{model[:100]}.*"):
        LLM(model=model)


def test_unknown_settings_are_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer: must be a folder, got '\[1\]'"):
        LLM(model="/nowhere", tokenizer=[1])  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"'max_num_seq': unknown engine argument; did you mean max_num_seqs\? Known arguments are"
    ):
        LLM(model="/nowhere", max_num_seq=3)
    with pytest.raises(
        ConfigError, match="'trust_remote_code': value True is not supported by this engine; code of a checkpoint"
    ):
        LLM(model="/nowhere", trust_remote_code=True)


def test_vllm_arguments_without_effect_are_accepted(models: Any) -> None:
    llm = models.load(
        trust_remote_code=False, enforce_eager=True, disable_log_stats=True, dtype="float", hf_overrides=None
    )
    [output] = llm.generate(TEXTS[0], GREEDY)
    assert output.outputs[0].token_ids == models.expected(output.prompt_token_ids)


@pytest.fixture
def failing(models: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BaseException], None]]:
    """Return a function that makes the third step of the next run fail."""

    def arm(error: BaseException) -> None:
        runner, count = models.llm.engine._runner, iter(range(100))
        execute = runner.execute

        def fail(plan: Any) -> Any:
            if next(count) == 2:
                raise error
            return execute(plan)

        monkeypatch.setattr(runner, "execute", fail)

    yield arm


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()], ids=repr)
def test_llm_is_usable_after_a_failure(
    models: Any, failing: Callable[[BaseException], None], error: BaseException
) -> None:
    failing(error)
    with pytest.raises(Internal if isinstance(error, RuntimeError) else KeyboardInterrupt):
        models.llm.generate(TEXTS, GREEDY)
    engine: Engine = models.llm.engine
    assert not engine.has_work and engine.stats().num_used_blocks == 0
    engine.check_integrity()
    [output] = models.llm.generate(TEXTS[1], GREEDY)
    assert output.outputs[0].token_ids == models.expected(output.prompt_token_ids)


def test_a_loaded_model_is_frozen_until_it_is_deleted(models, monkeypatch):
    """Garbage collections do not traverse it, and later ones can free what it leaves."""
    calls: list[str] = []
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, functools.partial(calls.append, name))
    llm = models.load()
    reference = weakref.ref(llm)
    assert calls == ["collect", "freeze"]
    del llm
    assert reference() is None
    assert calls == ["collect", "freeze", "unfreeze"]
