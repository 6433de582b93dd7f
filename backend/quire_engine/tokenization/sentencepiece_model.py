# SPDX-License-Identifier: Apache-2.0
"""Conversion of a SentencePiece model (tokenizer.model) to a tokenizer of the `tokenizers` library.

The module reads and writes the file with protobuf, so the sentencepiece package is not needed. tokenizer_files.py and
gguf_tokenizer.py call it.

Source: `LlamaConverter` and `SentencePieceExtractor` in transformers 5; src/sentencepiece_model.proto of SentencePiece.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from tokenizers import Regex, decoders, models, normalizers

from quire_spec.errors import ConfigError

_SPACE = "\u2581"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_Field = descriptor_pb2.FieldDescriptorProto
_FIELDS: dict[str, tuple[tuple[str, int, int, str], ...]] = {
    "Piece": (
        ("piece", 1, _Field.TYPE_STRING, ""),
        ("score", 2, _Field.TYPE_FLOAT, ""),
        ("type", 3, _Field.TYPE_INT32, "1"),
    ),
    "TrainerSpec": (
        ("model_type", 3, _Field.TYPE_INT32, "1"),
        ("byte_fallback", 35, _Field.TYPE_BOOL, ""),
        ("unk_id", 40, _Field.TYPE_INT32, "0"),
        ("unk_piece", 45, _Field.TYPE_STRING, "<unk>"),
        ("bos_piece", 46, _Field.TYPE_STRING, "<s>"),
        ("eos_piece", 47, _Field.TYPE_STRING, "</s>"),
    ),
    "NormalizerSpec": (
        ("precompiled_charsmap", 2, _Field.TYPE_BYTES, ""),
        ("add_dummy_prefix", 3, _Field.TYPE_BOOL, "true"),
        ("remove_extra_whitespaces", 4, _Field.TYPE_BOOL, "true"),
    ),
}
"""The fields that are read from each protobuf message. Each entry contains a field's name, number, type and default.
Enums are read as integers."""


def read_sentencepiece_model(path: Path) -> tuple[tokenizers.Tokenizer, str, str]:
    """Return the tokenizer of a SentencePiece model, and its pieces for the beginning and the end of a sequence.

    The tokenizer does not add special tokens to a text. If text follows a user-defined piece, the tokenizer adds a
    space before that text. The conversion in transformers does this too, but SentencePiece does not.

    Raises:
        ConfigError: the file is not a SentencePiece model, or is of a kind that this engine does not convert.
    """
    proto = _model_class()()
    try:
        proto.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise ConfigError(f"{path}: not a SentencePiece model: {error}; download it again") from error
    if not proto.pieces:
        raise ConfigError(f"{path}: contains no pieces; download it again")
    tokenizer = tokenizers.Tokenizer(_build_model(path, proto))
    tokenizer.normalizer = _build_normalizer(proto.normalizer_spec)
    has_prefix = proto.normalizer_spec.add_dummy_prefix
    strip = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(p.piece, normalized=False, special=p.type == _CONTROL)
            for p in proto.pieces
            if p.type in (_CONTROL, _USER_DEFINED)
        ]
    )
    tokenizer.add_special_tokens([proto.trainer_spec.unk_piece])
    return tokenizer, proto.trainer_spec.bos_piece, proto.trainer_spec.eos_piece


def write_sentencepiece_model(pieces: Sequence[tuple[str, float, int]], bos: str, eos: str, has_prefix: bool) -> bytes:
    """Return the content of a tokenizer.model of the kind BPE.

    Args:
        pieces: text, score and type of each piece.
        bos: the piece for the beginning of a sequence.
        eos: the piece for the end of a sequence.
        has_prefix: whether a space is added before each text.
    """
    proto = _model_class()()
    for text, score, kind in pieces:
        proto.pieces.add(piece=text, score=score, type=kind)
        if kind == _UNKNOWN:
            proto.trainer_spec.unk_id, proto.trainer_spec.unk_piece = len(proto.pieces) - 1, text
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = _BPE, True
    proto.trainer_spec.bos_piece, proto.trainer_spec.eos_piece = bos, eos
    proto.normalizer_spec.add_dummy_prefix, proto.normalizer_spec.remove_extra_whitespaces = has_prefix, False
    data: bytes = proto.SerializeToString()
    return data


def _build_model(path: Path, proto: Any) -> Any:
    trainer = proto.trainer_spec
    if trainer.model_type == _UNIGRAM:
        scores = [(p.piece, p.score) for p in proto.pieces]
        return models.Unigram(scores, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    if trainer.model_type == _BPE:
        vocab = {p.piece: i for i, p in enumerate(proto.pieces)}
        return models.BPE(
            vocab,
            _merges(proto, vocab),
            unk_token=trainer.unk_piece,
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    raise ConfigError(
        f"{path}: model_type {trainer.model_type} is neither unigram (1) nor BPE (2); save tokenizer.json with "
        "save_pretrained of transformers"
    )


def _merges(proto: Any, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of normal pieces that together form another normal piece.

    The pairs are sorted by the score of the piece that they form. The best score is first.
    """
    normal = {p.piece: p.score for p in proto.pieces if p.type == _NORMAL}
    merges = [
        (score, (left, right))
        for piece, score in normal.items()
        for left, right in sorted(
            ((piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in normal and piece[i:] in normal),
            key=lambda pair: (vocab[pair[0]], vocab[pair[1]]),
        )
    ]
    return [pair for _, pair in sorted(merges, key=lambda merge: -merge[0])]


def _build_normalizer(spec: Any) -> Any:
    steps: list[Any] = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    # SentencePiece adds a space even if the text already begins with a space. Metaspace would not add one.
    steps += [normalizers.Prepend(_SPACE)] if spec.add_dummy_prefix else []
    steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps)


@cache
def _model_class() -> Any:
    """Return the message class of a SentencePiece model.

    It has only the fields of `_FIELDS`. The protobuf library skips all other fields of a file.
    """
    file = descriptor_pb2.FileDescriptorProto(name="quire/sentencepiece_model.proto", package="quire", syntax="proto2")
    for message_name, fields in _FIELDS.items():
        message = file.message_type.add(name=message_name)
        for name, number, kind, default in fields:
            message.field.add(
                name=name, number=number, type=kind, label=_Field.LABEL_OPTIONAL, default_value=default or None
            )
    model = file.message_type.add(name="Model")
    for name, number, type_name, label in (
        ("pieces", 1, "Piece", _Field.LABEL_REPEATED),
        ("trainer_spec", 2, "TrainerSpec", _Field.LABEL_OPTIONAL),
        ("normalizer_spec", 3, "NormalizerSpec", _Field.LABEL_OPTIONAL),
    ):
        type_path = f".quire.{type_name}"
        model.field.add(name=name, number=number, type=_Field.TYPE_MESSAGE, type_name=type_path, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("quire.Model"))
