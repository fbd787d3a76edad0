"""Token ids to text as they come, a token at a time."""

import codecs

from paxserve.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """Incremental `Tokenizer.decode` of one sequence, at a cost per token that does not depend on what came before.

    The increments joined are exactly `decode` of all the ids. A character is held back until its last byte is there, so
    U+FFFD comes out only for bytes that can no longer become one.

    starts_text: whether the ids begin a text, as `decode` takes it. False when they continue a prompt: a space in front of
        the first word is then part of the text, and stays, with tokenizers that otherwise strip it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, starts_text: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_next = tokenizer.strips_leading_space and starts_text

    def push(self, token_id: int) -> str:
        """The text that is certain once `token_id` is known; often empty in the middle of a character."""
        if token_id in self._skipped:
            return ""
        return self._emit(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """Ends the sequence: U+FFFD if it stops inside a character, else nothing."""
        return self._emit(self._utf8.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._strip_next and text:
            self._strip_next = False
            return text.removeprefix(" ")
        return text
