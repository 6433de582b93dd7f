# SPDX-License-Identifier: Apache-2.0
"""Entries that older checkpoints keep in other files are found, and tokenizer_config.json takes precedence."""

import json
from pathlib import Path

import pytest

from quire_engine.tokenization.chat_template import ChatTemplate
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_engine.tokenization.tokenizer_config import read_eos_token_id, read_tokenizer_config
from quire_engine.weights.checkpoint import load_eos_token_ids
from quire_spec.model.model_config import ModelConfig

TINY = Path(__file__).parents[3] / "examples/models/tiny"


def copy(folder: Path, config: dict[str, object], **files: dict[str, object]) -> Path:
    """Write a checkpoint with the tiny model's tokenizer and these files."""
    (folder / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    for name, content in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_older_files_are_read_and_have_no_precedence(tmp_path: Path) -> None:
    older = {"special_tokens_map": {"eos_token": "a", "bos_token": "b"}, "chat_template": {"chat_template": "old"}}
    folder = copy(tmp_path, {"eos_token": "c"}, **older)
    assert read_tokenizer_config(folder) == {"eos_token": "c", "bos_token": "b", "chat_template": "old"}
    template = ChatTemplate.from_folder(folder)
    assert template is not None and template.render([{"role": "user", "content": "x"}]) == "old"


@pytest.mark.parametrize("where", ["tokenizer_config", "special_tokens_map", "added_tokens_decoder"])
def test_end_of_sequence_token_of_the_tokenizer_is_used_if_no_other_file_names_one(tmp_path: Path, where: str) -> None:
    original = read_tokenizer_config(TINY)
    tokenizer = Tokenizer(TINY)
    eos_id = tokenizer.eos_token_id
    assert eos_id is not None and tokenizer.get_vocab()[tokenizer.convert_ids_to_tokens(eos_id) or ""] == eos_id
    named = {"eos_token": original["eos_token"]}
    config = {} if where == "special_tokens_map" else named
    if where == "added_tokens_decoder":
        config = {**named, "added_tokens_decoder": {str(eos_id): {"content": original["eos_token"], "special": True}}}
    folder = copy(tmp_path, config, **({"special_tokens_map": named} if where == "special_tokens_map" else {}))
    assert read_eos_token_id(folder) == eos_id
    model_config = json.loads((TINY / "config.json").read_text())
    for own, expected in ((None, {eos_id}), (7, {7})):
        (folder / "config.json").write_text(json.dumps({**model_config, "eos_token_id": own}))
        assert load_eos_token_ids(folder, ModelConfig.load(folder)) == expected
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9.0]}))
    assert load_eos_token_ids(folder, ModelConfig.load(folder)) == {7, 9}


@pytest.mark.parametrize(
    "loop",
    [
        "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}",
        "{% for p in m.content | list %}{{ p.text }}{% endfor %}",
        "{% set c = m['content'] %}{% for p in c %}{{ p['text'] }}{% endfor %}",
    ],
)
@pytest.mark.parametrize("messages", ["messages", "messages[0:]", "all"])
def test_templates_that_read_parts_get_parts(loop: str, messages: str) -> None:
    source = f"{{% set all = messages %}}{{% for m in {messages} %}}[{{{{ m.role }}}}]{loop}{{% endfor %}}"
    template = ChatTemplate(source)
    for content in ("hello", [{"type": "text", "text": "hello"}]):
        assert template.render([{"role": "user", "content": content}]) == "[user]hello"
    final = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "I am"}]
    assert template.render(final, add_generation_prompt=False, continue_final_message=True).endswith("I am")


def test_templates_that_read_both_forms_get_texts() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source).render([{"role": "user", "content": "hello"}]) == "hello"
