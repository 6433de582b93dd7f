# SPDX-License-Identifier: Apache-2.0
"""The offline API identifies an adapter by the content of its folder, even if folders change between calls."""

import shutil
from pathlib import Path

import pytest
from support.tiny_checkpoints import VOCAB
from support.tokenizer import byte_level

from quire_engine import LLM, LoRARequest, SamplingParams
from quire_spec.documents.adapter_digest import CHAT_TEMPLATE_FILE
from quire_spec.errors import InvalidArgument

from .conftest import Models

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = "the quick fox"


@pytest.fixture(scope="module")
def llm(models: Models) -> LLM:
    """Return an LLM that has room for one adapter, so that each use of another adapter evicts it."""
    return models.load(max_loras=1, max_cpu_loras=1, enable_prefix_caching=False)


def _generate(llm: LLM, *folders: Path) -> list[list[int]]:
    loras = [LoRARequest("x", 1, str(folder)) for folder in folders]
    outputs = llm.generate([PROMPT] * len(loras), GREEDY, use_tqdm=False, lora_request=loras)
    return [output.outputs[0].token_ids for output in outputs]


def _expected(models: Models, name: str) -> list[int]:
    return models.expected(byte_level(VOCAB - 1).encode(PROMPT).ids, name)


def _write(models: Models, name: str, folder: Path) -> Path:
    return Path(shutil.copytree(models.paths[name], folder, dirs_exist_ok=True))


def test_an_evicted_adapter_is_read_from_the_folder_of_the_request(models: Models, llm: LLM, tmp_path: Path) -> None:
    a, b = _expected(models, "a"), _expected(models, "b")
    assert a != b
    latest, saved = _write(models, "a", tmp_path / "latest"), _write(models, "a", tmp_path / "saved")
    assert _generate(llm, latest) == [a]
    _write(models, "b", latest)
    assert _generate(llm, latest) == [b]
    assert _generate(llm, saved) == [a]
    assert _generate(llm, latest, saved, latest) == [b, a, b]


def test_a_folder_with_the_same_content_replaces_a_removed_folder(models: Models, llm: LLM, tmp_path: Path) -> None:
    first, final = _write(models, "a", tmp_path / "first"), _write(models, "a", tmp_path / "final")
    expected = _expected(models, "a")
    assert _generate(llm, first) == [expected]
    shutil.rmtree(first)
    _generate(llm, models.paths["b"])
    assert _generate(llm, final) == [expected]
    with pytest.raises(InvalidArgument, match=r"'x': .*No such file"):
        _generate(llm, first)


def test_a_folder_that_changes_during_a_call_is_an_error(
    models: Models, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, b = _write(models, "a", tmp_path / "a"), models.paths["b"]
    _generate(llm, folder)
    _generate(llm, b)
    read_pending_adapters = llm.engine.read_pending_adapters
    with monkeypatch.context() as patch:

        def change_first(**options: bool) -> None:
            _write(models, "b", folder)
            read_pending_adapters(**options)

        patch.setattr(llm.engine, "read_pending_adapters", change_first)
        with pytest.raises(InvalidArgument, match=r"its files changed while requests used them; call again"):
            _generate(llm, folder)
    assert _generate(llm, folder) == [_expected(models, "b")]


def test_chat_uses_the_template_of_the_adapter(models: Models, tmp_path: Path) -> None:
    folder = _write(models, "a", tmp_path / "a")
    (folder / CHAT_TEMPLATE_FILE).write_text("ADAPTER<{{ messages[0].content }}>")
    own, plain = LoRARequest("own", 1, str(folder)), models.loras["b"]
    conversations = [[{"role": "user", "content": "hi"}]] * 3
    llm = models.load(chat_template="MODEL<{{ messages[0].content }}>")
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False, lora_request=[own, plain, None])
    assert [output.prompt for output in outputs] == ["ADAPTER<hi>", "MODEL<hi>", "MODEL<hi>"]
    given = "GIVEN<{{ messages[0].content }}>"
    [output] = llm.chat(conversations[0], GREEDY, use_tqdm=False, lora_request=own, chat_template=given)
    assert output.prompt == "GIVEN<hi>"
    [output] = models.llm.chat(conversations[0], GREEDY, use_tqdm=False, lora_request=own)
    assert output.prompt == "ADAPTER<hi>"
    with pytest.raises(InvalidArgument, match="has no chat template"):
        models.llm.chat(conversations[0], GREEDY, use_tqdm=False, lora_request=plain)
