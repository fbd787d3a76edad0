"""Finding a model directory's tokenizer."""

from pathlib import Path

from paxserve.tokenizers.hf import load_hf
from paxserve.tokenizers.spm import load_spm
from paxserve.tokenizers.tokenizer import Tokenizer


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer in `directory`: its tokenizer.json, else its tokenizer.model, else None.

    Raises ValueError or NotImplementedError for one that is malformed or of an unsupported kind.
    """
    if (directory / "tokenizer.json").exists():
        return load_hf(directory)
    if (directory / "tokenizer.model").exists():
        return load_spm(directory)
    return None
