# SPDX-License-Identifier: Apache-2.0
"""The checks of an adapter before it is used: the effect probe, the norm limit and the canary, on the real core."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine_processes import EngineProcesses, IpcClient
from support.tiny_checkpoints import greedy_output, make_llama, make_llama_adapter

from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument, QuireError, Unavailable
from quire_spec.protocol.messages import AbortSequences, SequenceRequest, StepResult
from quire_spec.protocol.results import MAX_ROUNDING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), max_positions=16384)


@pytest.fixture(scope="module")
def good(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_adapter(model, tmp_path_factory.mktemp("adapter"), 0)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcesses]:
    config = {"model": str(model), "dtype": request.param, "kv_cache_memory_bytes": 8 * 2**20, "max_num_seqs": 4}
    with EngineProcesses(tmp_path_factory.mktemp("run"), enable_lora=True, max_loras=1, **config) as processes:
        yield processes.start("core")
        assert "Traceback" not in processes.log("core")


@pytest.fixture
def supervisor(engine: EngineProcesses) -> Iterator[IpcClient]:
    with engine.connect("core", "supervisor") as peer:
        yield peer
    engine.wait_idle()


def with_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file(change(tensors), folder / "adapter_model.safetensors")

    return apply


def with_config(**fields: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return apply


def zero_b(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in tensors.items()}


def shifted(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("model.layers", "model.language.layers"): t for name, t in tensors.items()}


def with_nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = min(tensors)
    return tensors | {first: torch.full_like(tensors[first], torch.nan)}


SIX = {
    "B is zero": (with_tensors(zero_b), "NoEffect"),
    "alpha is tiny": (with_config(lora_alpha=1e-9), "NoEffect"),
    "alpha is huge": (with_config(lora_alpha=1e6), "Diverged: "),
    "names are shifted": (with_tensors(shifted), "is not a LoRA matrix"),
    "NaN": (with_tensors(with_nan), "NaN or infinity"),
    "good": (lambda folder: None, "Loaded"),
}


@pytest.mark.parametrize("case", SIX)
def test_six_adapters_get_six_verdicts(case: str, good: Path, supervisor: IpcClient, tmp_path: Path):
    change, verdict = SIX[case]
    folder = Path(shutil.copytree(good, tmp_path / "adapter"))
    change(folder)
    if verdict in ("NoEffect", "Loaded"):
        supervisor.call("load_adapter", digest=case, path=str(folder))
        effect = supervisor.call("verify_adapter", digest=case, path=str(folder))["effect"]
        assert (effect > MAX_ROUNDING) == (verdict == "Loaded")
        supervisor.call("unload_adapter", digest=case)
        return
    with pytest.raises(InvalidArgument, match=verdict):
        supervisor.call("load_adapter", digest=case, path=str(folder))


def test_trained_tokens_are_part_of_the_probe(good: Path, supervisor: IpcClient, tmp_path: Path):
    """An adapter that changes nothing but the rows of some tokens has an effect only on them."""
    folder = Path(shutil.copytree(good, tmp_path / "adapter"))
    with_tensors(zero_b)(folder)
    with_config(trainable_token_indices=[77, 78])(folder)
    rows = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    hidden = json.loads((Path(json.loads((good / "adapter_config.json").read_text())["base_model_name_or_path"])
                         / "config.json").read_text())["hidden_size"]  # fmt: skip
    with_tensors(lambda tensors: tensors | {rows: torch.ones(2, hidden)})(folder)
    supervisor.call("load_adapter", digest="rows", path=str(folder))
    assert supervisor.call("verify_adapter", digest="rows", path=str(folder))["effect"] > MAX_ROUNDING
    supervisor.call("unload_adapter", digest="rows")


def test_the_invocation_is_part_of_the_probe(good: Path, supervisor: IpcClient, tmp_path: Path):
    """Without its invocation, an activated adapter has no effect."""
    folder = Path(shutil.copytree(good, tmp_path / "adapter"))
    with_config(alora_invocation_tokens=[200, 201])(folder)
    supervisor.call("load_adapter", digest="invoked", path=str(folder))
    assert supervisor.call("verify_adapter", digest="invoked", path=str(folder))["effect"] > MAX_ROUNDING
    supervisor.call("unload_adapter", digest="invoked")


@pytest.fixture
def loaded(supervisor: IpcClient, good: Path) -> Iterator[dict[str, str]]:
    adapter = {"digest": "good", "path": str(good)}
    supervisor.call("load_adapter", **adapter)
    yield adapter
    supervisor.call("unload_adapter", digest="good")


def adapted_output(engine: EngineProcesses, model: Path, prompt: str, num_tokens: int) -> str:
    tokenizer = Tokenizer.from_folder(model)
    assert tokenizer is not None
    with engine.connect("core", "text") as text:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        text.send(SequenceRequest(1, tokenizer.encode(prompt), params, "good"))
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            step = text.receive()
            assert isinstance(step, StepResult)
            tokens += [token for result in step.results for token in result.token_ids]
    return tokenizer.decode(tokens)


def test_canary_expects_the_greedy_output(
    engine: EngineProcesses, supervisor: IpcClient, loaded: dict[str, str], model: Path
):
    output = adapted_output(engine, model, "Once upon a time", 8)
    canary = {"prompt": "Once upon a time", "expect": output, "maxTokens": 8}
    supervisor.call("verify_adapter", **loaded, canary=canary)
    with pytest.raises(InvalidArgument, match=r"CanaryFailed: the output is .* must start with 'never'"):
        supervisor.call("verify_adapter", **loaded, canary=canary | {"expect": "never"})


def test_canary_limits_the_logprob(supervisor: IpcClient, loaded: dict[str, str]):
    canary = {"prompt": "Once upon", "completion": " a time", "minLogprob": -900}
    logprob = supervisor.call("verify_adapter", **loaded, canary=canary)["canary_logprob"]
    assert -900 < logprob < 0
    supervisor.call("verify_adapter", **loaded, canary=canary | {"minLogprob": logprob - 1e-3})
    with pytest.raises(InvalidArgument, match=r"CanaryFailed: .* mean log probability -"):
        supervisor.call("verify_adapter", **loaded, canary=canary | {"minLogprob": logprob + 1e-3})


def test_other_streams_go_on_during_checks_and_a_canary_that_never_ends(
    engine: EngineProcesses, supervisor: IpcClient, loaded: dict[str, str], model: Path
):
    """A stream gets its tokens while adapters are probed and a canary runs into its time limit."""
    endless = {"prompt": "Once", "expect": "x" * 4000, "maxTokens": 16000, "timeoutSeconds": 1}
    errors: list[QuireError] = []

    def run_checks() -> None:
        for _ in range(5):
            supervisor.call("verify_adapter", **loaded)
        try:
            supervisor.call("verify_adapter", **loaded, canary=endless)
        except QuireError as error:
            errors.append(error)

    with engine.connect("core", "text") as text:
        text.send(SequenceRequest(1, [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=9000, ignore_eos=True)))
        thread = threading.Thread(target=run_checks)
        tokens, times = [], []
        thread.start()
        while thread.is_alive() and len(tokens) < 8900:
            step = text.receive()
            assert isinstance(step, StepResult)
            assert {result.id for result in step.results} <= {1}, "internal sequences are not published"
            assert {started.id for started in step.started} <= {1}
            tokens += [token for result in step.results for token in result.token_ids]
            times.append(time.monotonic())
        text.send(AbortSequences([1]))
        thread.join()
    assert len(tokens) > 50
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    assert gaps[-1] < 1.0, "a probe takes one step"
    if '"float32"' in engine.config_file.read_text():
        assert tokens[:50] == greedy_output(model, [5, 6, 7], 50)
    assert [type(error) for error in errors] == [Unavailable]
    assert "the canary did not end within 1 s" in str(errors[0])
