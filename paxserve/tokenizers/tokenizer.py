"""The one interface that the engine and the server know of a tokenizer."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back. Every token stands for a fixed string of bytes, so text is those bytes joined and read as UTF-8.

    bos_token_id, eos_token_id: None where the vocabulary has none.
    special_ids: control tokens, which `decode` leaves out unless told otherwise.
    chat_template: the Jinja source that came with the tokenizer, if any.
    strips_leading_space: the vocabulary marks word starts (SentencePiece's dummy prefix), so `decode` drops one space from
        the front of a text.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    special_ids: frozenset[int]
    chat_template: str | None
    strips_leading_space: bool

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens spelled out in the text become their ids, always; `add_special_tokens` governs
        only what the tokenizer adds around a text (BOS, EOS). Text from a chat template already has them: pass False."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, possibly a part of a character; a special token's are its name.

        Empty for an id without a token (models pad their embeddings past the vocabulary).
        """

    def token_text(self, token_id: int) -> str:
        """A token on its own, for showing it: leading spaces kept, U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD, one per maximal ill-formed part (Unicode 3.9, D93b)."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text
