"""Text to token ids and back: tokenizers of three file formats, streaming detokenization, stop strings, chat templates."""

from paxserve.tokenizers.chat import ChatTemplate
from paxserve.tokenizers.detokenizer import Detokenizer
from paxserve.tokenizers.gguf import tokenizer_from_gguf
from paxserve.tokenizers.load import load_tokenizer
from paxserve.tokenizers.stop import StopStrings
from paxserve.tokenizers.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "Tokenizer", "load_tokenizer", "tokenizer_from_gguf"]
