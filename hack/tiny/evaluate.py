# SPDX-License-Identifier: Apache-2.0
"""Measures the loss of the tiny model and its adapters on unseen texts, and how many unseen requests they answer
exactly.

    python hack/tiny/evaluate.py                    the model under examples/
    python hack/tiny/evaluate.py --out /tmp/tiny    the model that train.py --out wrote

Losses are in nats per character, because models with different vocabularies split the same text into different numbers
of tokens.
"""

import argparse
import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import chat
import corpus
import objects
import tokens
import tools
import torch
import turns
from learn import loss_of
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

_SEED = 77_777
_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def character_loss(model: LlamaForCausalLM | PeftModel, tokenizer: PreTrainedTokenizerFast, name: str) -> float:
    """Return the model's loss on documents of a corpus that the training did not use. The unit is nats per character.
    Characters that a training run would ignore are not counted. The documents are evaluated one at a time."""
    total, num_chars = 0.0, 0
    for document in islice(corpus.CORPORA[name](_SEED), 40):
        ids, labels = tokens.encoded(tokenizer.backend_tokenizer, document)
        ids, labels = ids[:512], labels[:512]
        num_labels = sum(label != tokens.IGNORED for label in labels[1:])
        with torch.inference_mode():
            total += num_labels * loss_of(model, (torch.tensor([ids]), torch.tensor([labels]))).item()
        num_chars += len(document.text)
    return total / num_chars


def replies(
    model: LlamaForCausalLM | PeftModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str], max_tokens: int = 96
) -> list[str]:
    """Return the replies to rendered conversations. They are generated greedily and include the token that ends the
    turn."""
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    with torch.inference_mode():
        output = model.generate(**encoded, max_new_tokens=max_tokens, do_sample=False)
    texts = tokenizer.batch_decode(output[:, encoded["input_ids"].shape[1] :], skip_special_tokens=False)
    return [text.replace(turns.PADDING, "") for text in texts]


def exact(
    model: LlamaForCausalLM | PeftModel, tokenizer: PreTrainedTokenizerFast, chats: Iterable[turns.Chat]
) -> list[tuple[str, str]]:
    """Print how many replies are exactly the expected ones. For all other requests, return the expected reply and the
    actual reply."""
    rendered = [conversation.rendered() for conversation in chats]
    given = replies(model, tokenizer, [prompt for prompt, _ in rendered])
    pairs = [(expected, reply) for (_, expected), reply in zip(rendered, given, strict=True)]
    print(f"{sum(expected == reply for expected, reply in pairs)} of {len(pairs)} exact")
    return [(expected, reply) for expected, reply in pairs if expected != reply]


def main() -> None:
    """Print all measurements."""
    parser = argparse.ArgumentParser(description="Measure the tiny model and its adapters.")
    parser.add_argument(
        "--out",
        type=Path,
        default=_EXAMPLES,
        help="folder that contains models/tiny and adapters/* (default: examples)",
    )
    parser.add_argument("--count", type=int, default=60, help="number of requests of each kind (default %(default)s)")
    arguments = parser.parse_args()
    folder = arguments.out / "models/tiny"
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def model_of(name: str) -> LlamaForCausalLM | PeftModel:
        base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return PeftModel.from_pretrained(base, arguments.out / "adapters" / name).eval() if name != "base" else base

    for name in ("base", "pirate", "sql", "tools"):
        if name == "base" or (arguments.out / "adapters" / name).exists():
            print(f"{name}: {character_loss(model_of(name), tokenizer, name):.4f} nats a character")
    if tokenizer.convert_tokens_to_ids(turns.END_OF_TURN) is None:
        return
    rng = random.Random(_SEED)
    print("base, conversations: ", end="")
    for expected, reply in exact(model_of("base"), tokenizer, [chat.chat(rng) for _ in range(arguments.count)])[:3]:
        print(f"  {expected!r}\n  {reply!r}")
    if not (arguments.out / "adapters/tools").exists():
        return
    calls = [tools.chat(rng, responded=0.0) for _ in range(arguments.count)]
    results = [tools.chat(rng, responded=1.0) for _ in range(arguments.count)]
    asked = [objects.chat(rng) for _ in range(arguments.count)]
    model = model_of("tools")
    for kind, chats in (("calls", calls), ("answers from results", results), ("JSON", asked)):
        print(f"tools, {kind}: ", end="")
        for expected, reply in exact(model, tokenizer, chats)[:3]:
            print(f"  {expected!r}\n  {reply!r}")


if __name__ == "__main__":
    main()
