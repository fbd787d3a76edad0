"""Tokenizers run by Hugging Face's `tokenizers` library: `tokenizer.json`, and what is built from a GGUF."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from paxserve.tokenizers.config import TokenizerConfig
from paxserve.tokenizers.tokenizer import Tokenizer

SPACE_MARK = "▁"


class HfTokenizer(Tokenizer):
    """A byte-level BPE (GPT-2) or a BPE with byte fallback (Llama) in a `tokenizers.Tokenizer`.

    add_bos, add_eos: whether `encode` puts BOS before and EOS behind a text; None leaves it to the tokenizer's own
        post-processor.

    Raises NotImplementedError for a decoder other than these two kinds', ValueError if a token to be added is missing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.vocab_size = backend.get_vocab_size()
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        named = {i for i in (bos_token_id, eos_token_id) if i is not None}
        self.special_ids = frozenset(named.union(i for i, token in added.items() if token.special))
        self.chat_template = chat_template
        self._backend = backend
        self._byte_level, self.strips_leading_space = _decoder_kind(backend)
        self._literals = {i: token.content.encode() for i, token in added.items()} if self._byte_level else {}
        prefix, suffix = _post_processor_ids(backend)
        self._prefix = with_token("BOS", prefix, bos_token_id, add_bos)
        self._suffix = with_token("EOS", suffix, eos_token_id, add_eos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._literals:
            return self._literals[token_id]
        piece = self._backend.id_to_token(token_id) or ""
        return byte_level_bytes(piece) if self._byte_level else piece_bytes(piece)


def load_hf(directory: Path) -> HfTokenizer:
    """`tokenizer.json` of a model directory, with the files beside it honoured.

    Raises ValueError if the files contradict each other or are malformed.
    """
    try:
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{directory / 'tokenizer.json'} cannot be read: {error}") from error
    config = TokenizerConfig.read(directory)
    for token_id, token in config.added_tokens:
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([tokenizers.AddedToken(token.content, special=token.special, normalized=False)])
        if backend.token_to_id(token.content) != token_id:
            raise ValueError(
                f"{directory}: {token.content!r} is token {token_id} in tokenizer_config.json, "
                f"but {backend.token_to_id(token.content)} in tokenizer.json"
            )

    def known(token: str | None) -> int | None:
        token_id = None if token is None else backend.token_to_id(token)
        if token is not None and token_id is None:
            raise ValueError(f"{directory}: the special token {token!r} is not in the vocabulary")
        return token_id

    return HfTokenizer(
        backend,
        bos_token_id=known(config.bos_token),
        eos_token_id=known(config.eos_token),
        add_bos=config.add_bos,
        add_eos=config.add_eos,
        chat_template=config.chat_template,
    )


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: a printable Latin-1 byte is itself, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level piece; one with characters outside the alphabet stands for itself."""
    alphabet = byte_alphabet()
    return bytes(alphabet[c] for c in piece) if all(c in alphabet for c in piece) else piece.encode()


def piece_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece piece: `<0xNN>` is a byte, U+2581 a space."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace(SPACE_MARK, " ").encode()


def with_token(name: str, ids: list[int], token_id: int | None, wanted: bool | None) -> list[int]:
    """`ids` put before ("BOS") or behind ("EOS") a text, with that token among them or not; None leaves them as they are."""
    if wanted is None or wanted == (token_id in ids):
        return ids
    if not wanted:
        return [i for i in ids if i != token_id]
    if token_id is None:
        raise ValueError(f"the tokenizer is configured to add {name}, but names no {name} token")
    return [token_id, *ids] if name == "BOS" else [*ids, token_id]


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(byte-level, strips the leading space), read off the decoder's own description."""
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [s["type"] for s in steps] == ["ByteLevel"]:
        return True, False
    strips = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    replaces = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    plain = [s for s in steps if s != strips]
    if plain == [replaces, {"type": "ByteFallback"}, {"type": "Fuse"}]:
        return False, strips in steps
    raise NotImplementedError(
        f"tokenizer.json has the decoder {json.dumps(decoder, ensure_ascii=False)}: only ByteLevel and the Llama kind "
        "(Replace, ByteFallback, Fuse, Strip) are supported"
    )


def _post_processor_ids(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and behind a text."""
    bare, full = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    return full[:start], full[start + len(bare) :]
