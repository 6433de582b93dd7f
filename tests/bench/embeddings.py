# SPDX-License-Identifier: Apache-2.0
"""Embeddings of 256 texts of 128 tokens: this engine and sentence-transformers, the same weights.

    python tests/bench/embeddings.py                        # the 135M shape of Llama, last-token pooling
    python tests/bench/embeddings.py --shape bert-base      # BERT-base, pooling of the first token

Random weights in bfloat16, normalized. Both engines read the texts, so tokenizing counts.
Runs alternate, and the fastest run of each counts. sentence-transformers runs in the faster of float32 and bfloat16.
Without that package, transformers runs the same batches (32 texts of equal length, no padding). Before the runs, the
vectors of both are compared.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

import torch  # noqa: E402
from random_checkpoint import cached_checkpoint  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers import AutoModel  # noqa: E402

from quire_engine.core.engine import Engine  # noqa: E402
from quire_engine.tokenization.tokenizer import Tokenizer  # noqa: E402
from quire_spec.engine.config import EngineConfig  # noqa: E402
from quire_spec.engine.pooling_params import PoolingParams  # noqa: E402
from quire_spec.engine.sampling_params import SamplingParams  # noqa: E402
from quire_spec.model.model_config import ModelConfig  # noqa: E402
from quire_spec.protocol.messages import SequenceRequest  # noqa: E402

NUM_TEXTS, NUM_TOKENS, BATCH_SIZE = 256, 128, 32
Encode = Callable[[list[str]], torch.Tensor]
"""Returns the vectors of texts, [num_texts, hidden_size] float32."""


def make_texts(tokenizer: Tokenizer) -> list[str]:
    """Return texts that have NUM_TOKENS tokens each."""
    rng, texts = random.Random(0), []
    while len(texts) < NUM_TEXTS:
        ids = [rng.randrange(300, 49152) for _ in range(2 * NUM_TOKENS)]
        words = tokenizer.encode(tokenizer.decode(ids).replace("\ufffd", "x"))[:NUM_TOKENS]
        text = tokenizer.decode(words).replace("\ufffd", "x")
        if len(tokenizer.encode(text)) == NUM_TOKENS:
            texts.append(text)
    return texts


def quire(folder: Path, tokenizer: Tokenizer) -> Encode:
    """Return the engine's function."""
    config = EngineConfig(str(folder), dtype="bfloat16", convert="embed", max_model_len=256, max_num_seqs=64)
    engine, count = Engine.from_config(config), 0

    def encode(texts: list[str]) -> torch.Tensor:
        nonlocal count
        first, count = count, count + len(texts)
        params, salt = (
            SamplingParams(max_tokens=1),
            str(first),
        )  # a salt of its own: nothing comes from the prefix cache
        for i, text in enumerate(texts):
            engine.add(SequenceRequest(first + i, tokenizer.encode(text), params, None, salt, pooling=PoolingParams()))
        vectors: dict[int, bytes] = {}
        while engine.has_work:
            vectors |= {result.id: result.pooled or b"" for result in engine.step().results}
        return torch.stack(
            [torch.frombuffer(bytearray(vectors[first + i]), dtype=torch.float32) for i in range(len(texts))]
        )

    return encode


def reference(folder: Path, tokenizer: Tokenizer, dtype: torch.dtype) -> tuple[str, Encode]:
    """Return the name and the function of sentence-transformers, or of transformers if that is not installed."""
    is_encoder = ModelConfig.load(folder).encoder is not None
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    except ImportError:
        model = AutoModel.from_pretrained(folder, dtype=dtype).eval()
        position, options = (0, {}) if is_encoder else (-1, {"use_cache": False})

        @torch.inference_mode()
        def encode(texts: list[str]) -> torch.Tensor:
            ids = torch.tensor([tokenizer.encode(text) for text in texts])
            hidden = [model(batch, **options).last_hidden_state[:, position] for batch in ids.split(BATCH_SIZE)]
            return functional.normalize(torch.cat(hidden).float())

        return "transformers", encode
    transformer = Transformer(str(folder), model_kwargs={"dtype": dtype})
    if transformer.tokenizer.pad_token is None:
        transformer.tokenizer.pad_token = transformer.tokenizer.eos_token
    size = transformer.get_embedding_dimension()
    sentences = SentenceTransformer(
        modules=[transformer, Pooling(size, pooling_mode="cls" if is_encoder else "lasttoken"), Normalize()]
    )
    return "sentence-transformers", lambda texts: torch.tensor(sentences.encode(texts, batch_size=BATCH_SIZE)).float()


def run_s(encode: Encode, texts: list[str]) -> float:
    """Return the seconds of one run."""
    start = time.perf_counter()
    encode(texts)
    return time.perf_counter() - start


def main() -> None:
    """Compare the vectors, then the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--shape", choices=("135m", "bert-base"), default="135m")
    args = parser.parse_args()
    runs = args.runs
    folder = cached_checkpoint(args.shape)
    tokenizer = Tokenizer(folder)
    texts, ours = make_texts(tokenizer), quire(folder, tokenizer)
    times: dict[str, list[float]] = {}
    others: dict[str, Encode] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name, encode = reference(folder, tokenizer, dtype)
        others[f"{name} {str(dtype).removeprefix('torch.')}"] = encode
    exact = torch.empty(0)
    for name, encode in {**others, "quire bfloat16": ours}.items():
        start = time.perf_counter()
        vectors = encode(texts)
        times[name] = [time.perf_counter() - start]
        exact = exact if len(exact) else vectors
        cosines = (vectors * exact).sum(-1)
        print(f"{name}: least cosine with float32 {cosines.min():.5f}")
        assert cosines.min() > 0.98, "the vectors differ"
    # The runs above warm up, and select the faster precision.
    fastest = min(others, key=lambda name: times[name][0])
    for _ in range(runs):
        for name, encode in (("quire bfloat16", ours), (fastest, others[fastest])):
            times[name].append(run_s(encode, texts))
    best = {name: min(seconds) for name, seconds in times.items()}
    for name, seconds in best.items():
        print(f"{name}: {seconds:.2f} s, {NUM_TEXTS / seconds:.0f} texts/s")
    own = best.pop("quire bfloat16")
    print(f"ratio {min(best.values()) / own:.2f}")


if __name__ == "__main__":
    main()
