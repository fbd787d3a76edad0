"""The vocabulary in a GGUF file's metadata (`tokenizer.ggml.*`, see the GGUF specification), as a `tokenizers` object."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from paxserve.tokenizers.hf import SPACE_MARK, HfTokenizer
from paxserve.tokenizers.pre_tokenizers import pre_tokenizer

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> HfTokenizer:
    """Builds the tokenizer of `tokenizer.ggml.model` "gpt2" (byte-level BPE) or "llama" (SentencePiece BPE).

    Raises ValueError for a missing or malformed key, NotImplementedError for another model or an unknown pre-tokenizer.
    """
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    for key in ("model", "tokens", "token_type"):
        if key not in fields:
            raise ValueError(
                f"the GGUF has no tokenizer.ggml.{key}: it holds no vocabulary, give a tokenizer of its own"
            )
    tokens, types = list(fields["tokens"]), [int(t) for t in fields["token_type"]]
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, {len(set(tokens))} of them distinct, "
            f"and tokenizer.ggml.token_type {len(types)}: the three must be equal"
        )
    kind = fields["model"]
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(tokens, fields)
    elif kind == "llama":
        backend, add_bos = _sentencepiece_bpe(tokens, types, fields), True
    else:
        raise NotImplementedError(f"tokenizer.ggml.model {kind!r} is not supported: only 'gpt2' and 'llama' are")
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            special = token_type != _USER_DEFINED
            backend.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False)])
    return HfTokenizer(
        backend,
        bos_token_id=_token_id(fields, "bos_token_id", len(tokens)),
        eos_token_id=_token_id(fields, "eos_token_id", len(tokens)),
        add_bos=bool(fields.get("add_bos_token", add_bos)),
        add_eos=bool(fields.get("add_eos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _byte_level_bpe(tokens: list[str], fields: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer and whether it adds BOS where the file does not say."""
    if "merges" not in fields:
        raise ValueError("the GGUF has no tokenizer.ggml.merges, which a 'gpt2' vocabulary needs")
    pre = pre_tokenizer(fields.get("pre", "default"))
    merges = []
    for merge in fields["merges"]:
        left, separator, right = merge[1:].partition(" ")
        if not separator:
            raise ValueError(f"tokenizer.ggml.merges has {merge!r}: it must be two tokens with a space between")
        merges.append((merge[0] + left, right))
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.ignore_merges))
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece_bpe(tokens: list[str], types: list[int], fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE joins, of all neighbours that form a piece, those of the highest score, leftmost first. As ranked
    pairs: every way to split a piece in two, ranked by the piece's score.

    Among equal scores (whitespace runs in Llama's vocabularies) leftmost first lets the leftmost run grow before a second
    one starts: the longer left half ranks first.
    """
    if "scores" not in fields or len(fields["scores"]) != len(tokens):
        raise ValueError("a 'llama' vocabulary needs tokenizer.ggml.scores, one for each token")
    if fields.get("remove_extra_whitespaces"):
        raise NotImplementedError("tokenizer.ggml.remove_extra_whitespaces is not supported for a 'llama' vocabulary")
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = {
        t: float(score) for t, kind, score in zip(tokens, types, fields["scores"], strict=True) if kind == _NORMAL
    }
    splits = [
        (piece, cut)
        for piece in scores
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    splits.sort(key=lambda split: (-scores[split[0]], -split[1]))
    merges = [(piece[:cut], piece[cut:]) for piece, cut in splits]
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    escape: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    unescape: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("add_space_prefix", True):
        escape.insert(0, normalizers.Prepend(SPACE_MARK))
        unescape.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(escape)
    backend.decoder = decoders.Sequence(unescape)
    return backend


def _token_id(fields: Mapping[str, Any], key: str, size: int) -> int | None:
    if key not in fields:
        return None
    token_id = int(fields[key])
    if not 0 <= token_id < size:
        raise ValueError(f"tokenizer.ggml.{key} is {token_id}, outside the vocabulary of {size} tokens")
    return token_id
