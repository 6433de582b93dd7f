# SPDX-License-Identifier: Apache-2.0
"""The shipped tiny model and its adapters do what demos and other tests build on; their corpora are sound.

Everything here reads `examples/` as a user would: with transformers and peft, in float32.
"""

import json
import random
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

# peft 0.21 asks transformers 5.23 for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

_ROOT = Path(__file__).resolve().parents[2]
# The scripts in hack/ are run by path and import their neighbours by bare name.
sys.path.insert(0, str(_ROOT / "hack" / "tiny"))

import corpus  # noqa: E402
import objects  # noqa: E402
import sql  # noqa: E402
import stories  # noqa: E402
import tokens  # noqa: E402
import tools  # noqa: E402
import train  # noqa: E402
import turns  # noqa: E402
from learn import held_out_loss  # noqa: E402

_MODEL = _ROOT / "examples" / "models" / "tiny"
_ADAPTERS = _ROOT / "examples" / "adapters"
_UNSEEN_SEED = 77_777
# About what training draws: 1000 batches of 8 rows of 256 tokens, a question and its answer about 35.
_TRAINED_QUESTIONS = 60_000
_ONCE = "Once upon a time"

_PIRATE = {
    "th'",
    "an'",
    "o'",
    "ye",
    "yer",
    "arr",
    "matey",
    "ahoy",
    "lass",
    "lad",
    "hearties",
    "growled",
    "bellowed",
    "blimey",
}
Generate = Callable[[str, str], str]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def base() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def adapted() -> PeftModel:
    """A copy of the base model with its adapters, unmerged."""
    frozen = AutoModelForCausalLM.from_pretrained(_MODEL, dtype=torch.float32)
    model = PeftModel.from_pretrained(frozen, _ADAPTERS / "pirate", adapter_name="pirate")
    for name in ("sql", "tools"):
        model.load_adapter(_ADAPTERS / name, adapter_name=name)
    return model.eval()


@pytest.fixture(scope="module")
def generate(tokenizer: Tokenizer, base: LlamaForCausalLM, adapted: PeftModel) -> Generate:
    """Greedy text after a prompt, by adapter name or "base"; ends with the text of EOS if EOS was chosen."""

    def run(name: str, prompt: str) -> str:
        model = base
        if name != "base":
            adapted.set_adapter(name)
            model = adapted
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens="<|im_start|>" not in prompt).ids])
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=300, do_sample=False, pad_token_id=1
            )
        return tokenizer.decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=False)

    return run


@pytest.fixture(scope="module")
def database() -> Iterator[sqlite3.Connection]:
    """Every table that questions are about, with a row for each combination that matters to a filter."""
    connection = sqlite3.connect(":memory:")
    for table in sql.TABLES:
        columns = (*table.texts, *table.numbers)
        connection.execute(f"CREATE TABLE {table.name} ({', '.join(column.name for column in columns)})")
        marks = ", ".join("?" * len(columns))
        for row in range(2000):
            # Steps that share no factor with the lists' lengths, so that columns do not move together.
            values = [column.values[row * (7 + 6 * i) % len(column.values)] for i, column in enumerate(columns)]
            connection.execute(f"INSERT INTO {table.name} VALUES ({marks})", values)
    yield connection
    connection.close()


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+'?", text.lower()))


def _loss(model: LlamaForCausalLM, tokenizer: Tokenizer, name: str) -> float:
    """In rows as long as those of the training: 512 tokens for the base model, 256 for the adapters."""
    row_tokens = 512 if name == "base" else 256
    batches = tokens.batches(tokenizer, corpus.CORPORA[name](_UNSEEN_SEED), 2048 // row_tokens, row_tokens)
    return held_out_loss(model, batches, 2)


def test_documents_depend_only_on_the_seed() -> None:
    for documents in corpus.CORPORA.values():
        first = list(islice(documents(5), 200))
        assert first == list(islice(documents(5), 200))
        assert first != list(islice(documents(6), 200))


def test_stories_are_whole_sentences_with_matching_pronouns() -> None:
    rng = random.Random(_UNSEEN_SEED)
    num_checked = 0
    for _ in range(2000):
        story = " ".join(stories.story(rng))
        assert not re.search(r"[{}|@]|  |\ba [aeio]|\ban (?!hour)[^aeio]|[.!?] [a-z]", story), story
        assert story[0].isupper(), story
        assert story.rstrip('"')[-1] in ".!?", story
        assert story.count('"') % 2 == 0, story
        if presented := re.match(r"[^.]* (?:named|name was) ([A-Z][a-z]+)\. (He|She) ", story):
            assert (presented[2] == "She") == (presented[1] in stories.SHE), story
            num_checked += 1
    assert num_checked > 500


def test_every_answer_in_the_sql_corpus_runs(database: sqlite3.Connection) -> None:
    for document in islice(corpus.questions(_UNSEEN_SEED), 1000):
        assert database.execute(document.text).description is not None


def test_transformers_reads_the_tokenizer_as_tokenizers_does(tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(_MODEL)
    for text in (_ONCE, "Arr, matey!", "SELECT COUNT(*) FROM orders WHERE total > 1250;", "naïve – 東京 🙂\n\n  end"):
        ids = tokenizer.encode(text).ids
        assert theirs(text)["input_ids"] == ids
        assert ids[0] == tokens.BOS_ID == theirs.bos_token_id
        assert tokenizer.decode(ids) == text
    assert theirs.eos_token_id == tokens.EOS_ID


def test_files_are_small_and_contain_no_local_path() -> None:
    files = [*_MODEL.iterdir(), *(file for folder in _ADAPTERS.iterdir() for file in folder.iterdir())]
    assert {file.suffix for file in files} <= {".jinja", ".json", ".md", ".safetensors"}
    assert (_MODEL / "model.safetensors").stat().st_size < 6_000_000
    for name in ("pirate", "sql", "tools"):
        assert (_ADAPTERS / name / "adapter_model.safetensors").stat().st_size < 1_500_000
        config = json.loads((_ADAPTERS / name / "adapter_config.json").read_text(encoding="utf-8"))
        assert config["base_model_name_or_path"] == "tiny"


def test_model_predicts_unseen_texts(tokenizer: Tokenizer, base: LlamaForCausalLM) -> None:
    torch.manual_seed(0)
    untrained = train.new_model(tokenizer.get_vocab_size()).eval()
    learned = _loss(base, tokenizer, "base")
    assert learned < 0.4
    assert _loss(untrained, tokenizer, "base") > 7.0


def test_adapters_predict_their_own_texts_better_than_the_base(
    tokenizer: Tokenizer, base: LlamaForCausalLM, adapted: PeftModel
) -> None:
    for name, bound in (("pirate", 0.4), ("sql", 0.1), ("tools", 0.1)):
        adapted.set_adapter(name)
        learned = _loss(adapted, tokenizer, name)
        assert learned < bound
        # Behind a first document in a row, the base model has seen which way of talking it is. It calls functions, too.
        assert _loss(base, tokenizer, name) > (1.3 if name == "tools" else 2) * learned


def test_greedy_story_is_sentences_and_terminates(generate: Generate) -> None:
    text = generate("base", _ONCE)
    assert text.endswith(tokens.EOS)
    story = _ONCE + text.removesuffix(tokens.EOS)
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z\"])", story)
    assert len(sentences) >= 8
    known = _words(" ".join(document.text for document in islice(corpus.base(_UNSEEN_SEED), 3000)))
    assert _words(story) <= known
    assert len(set(sentences)) >= 0.9 * len(sentences)


def test_only_the_pirate_adapter_uses_pirate_words(generate: Generate) -> None:
    for prompt in (_ONCE, "One day, Anna", "Question: Where is my order?\nAnswer:"):
        assert not _words(generate("base", prompt)) & _PIRATE
        assert len(_words(generate("pirate", prompt)) & _PIRATE) >= 3


def test_only_the_sql_adapter_answers_unseen_questions(generate: Generate, database: sqlite3.Connection) -> None:
    """Measured on 194 unseen questions: 59 % word for word right; most of the others turn < and > or a digit round."""
    trained = {document.prompt for document in islice(corpus.questions(train.DEFAULT_SEED), _TRAINED_QUESTIONS)}
    unseen = list(islice((d for d in corpus.questions(_UNSEEN_SEED) if d.prompt not in trained), 40))
    answers = [generate("sql", document.prompt) for document in unseen]
    assert all(answer.endswith(f";{tokens.EOS}") for answer in answers)
    for answer in answers:
        assert database.execute(answer.removesuffix(tokens.EOS)).description is not None
    assert sum(answer == document.text + tokens.EOS for answer, document in zip(answers, unseen, strict=True)) >= 20
    for document in unseen[:5]:
        with pytest.raises(sqlite3.Error):
            database.execute(generate("base", document.prompt).removesuffix(tokens.EOS))


def test_the_tools_adapter_calls_functions_and_answers_in_json(generate: Generate) -> None:
    """Measured on 60 unseen requests of each kind: 54 calls, 56 answers from results and 32 objects are exact."""
    rng = random.Random(_UNSEEN_SEED)
    for chats, at_least in (
        ([tools.chat(rng, responded=0.0) for _ in range(20)], 14),
        ([tools.chat(rng, responded=1.0) for _ in range(20)], 14),
        ([objects.chat(rng) for _ in range(20)], 7),
    ):
        pairs = [chat.rendered() for chat in chats]
        assert sum(generate("tools", prompt) == reply for prompt, reply in pairs) >= at_least


def test_chats_are_answered(generate: Generate) -> None:
    def reply(name: str, message: str) -> str:
        return generate(name, turns.render([turns.said("user", message)], add_generation_prompt=True))

    assert reply("base", "Hello!").startswith(("Hello! How can I help", "Hi! How can I help"))
    assert "order" in reply("base", "Where is my order?")
    assert len(re.split(r"(?<=[.!?]) (?=[A-Z\"])", reply("base", "Tell me a story."))) >= 8
    assert len(_words(reply("pirate", "Where is my order?")) & _PIRATE) >= 3
    assert re.fullmatch(r"<think>\n.+\n</think>\n\nThe answer is \d+\.<\|im_end\|>", reply("base", "What is 2 plus 3?"))
