"""SentencePiece `tokenizer.model` files (arXiv:1808.06226), as the Llama and Mistral families use them."""

import re
from pathlib import Path

import sentencepiece

from paxserve.tokenizers.config import TokenizerConfig
from paxserve.tokenizers.hf import piece_bytes, with_token
from paxserve.tokenizers.tokenizer import Tokenizer


class SpmTokenizer(Tokenizer):
    """A SentencePiece model run by its own library, with special tokens recognised in the text.

    Each stretch of text between special tokens gets the model's dummy prefix, as in Llama's original tokenizer. BOS is added
    unless the configuration says otherwise, EOS is not.
    """

    def __init__(self, model: bytes, config: TokenizerConfig) -> None:
        """`model` holds the bytes of a `tokenizer.model`.

        Raises ValueError if it is none or the added tokens leave gaps, NotImplementedError for `"legacy": false`.
        """
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"not a SentencePiece model: {error}") from error
        if not config.legacy:
            raise NotImplementedError(
                'tokenizer_config.json says "legacy": false, which tokenizer.model cannot express: '
                "convert it to tokenizer.json (transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        size = processor.get_piece_size()
        added = {i: token for i, token in config.added_tokens if i >= size}
        if sorted(added) != list(range(size, size + len(added))):
            raise ValueError(f"added tokens {sorted(added)} do not continue a vocabulary of {size} pieces")
        special = {i for i in range(size) if processor.is_control(i) or processor.is_unknown(i)}
        special |= {i for i, token in config.added_tokens if token.special}
        names = {i: processor.id_to_piece(i) for i in special if i < size} | {i: t.content for i, t in added.items()}
        self._processor = processor
        self._added = {i: token.content.encode() for i, token in added.items()}
        self._ids = {name: i for i, name in names.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._specials = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self.vocab_size = size + len(added)
        self.special_ids = frozenset(special)
        self.bos_token_id = self._find(config.bos_token, processor.bos_id())
        self.eos_token_id = self._find(config.eos_token, processor.eos_id())
        self.chat_template = config.chat_template
        self.strips_leading_space = processor.normalize("a") != "a"
        self._prefix = with_token("BOS", [], self.bos_token_id, config.add_bos is not False)
        self._suffix = with_token("EOS", [], self.eos_token_id, config.add_eos is True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for part in self._specials.split(text):
            if part in self._ids:
                ids.append(self._ids[part])
            else:
                ids += self._processor.encode(part)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        return piece_bytes(self._processor.id_to_piece(token_id)) if 0 <= token_id < self.vocab_size else b""

    def _find(self, name: str | None, default: int) -> int | None:
        if name is None:
            return default if default >= 0 else None
        if name not in self._ids:
            raise ValueError(f"tokenizer_config.json names the special token {name!r}, which the vocabulary lacks")
        return self._ids[name]


def load_spm(directory: Path) -> SpmTokenizer:
    """`tokenizer.model` of a model directory, with the files beside it honoured."""
    return SpmTokenizer((directory / "tokenizer.model").read_bytes(), TokenizerConfig.read(directory))
