"""How byte-level BPE vocabularies cut text into words before merging: the names of `tokenizer.ggml.pre`.

The names and what they stand for are llama.cpp's (src/llama-vocab.cpp); where llama.cpp adapts an expression to its regex
engine and quotes the model's own, the model's own is used. Each expression in turn cuts what the ones before left whole,
into its matches and what lies between them.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = f"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_GPT4O = (
    f"{_WORD}{_UPPER}*{_LOWER}+{_ENGLISH}?|{_WORD}{_UPPER}+{_LOWER}*{_ENGLISH}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES
)

_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Cased letters as DeepSeek LLM lists them: an old Unicode's Lu, Ll and Lt, with gaps.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


@dataclass(frozen=True)
class PreTokenizer:
    """ignore_merges: a word that is a token is taken whole. add_bos: BOS is added where the file does not say."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(e), "isolated") for e in self.expressions]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_KINDS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "llama-bpe": PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}",  # the model's own tokenizer.json; llama.cpp has \p{N}+, the same for a vocabulary of single digits
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)),
}
_ALIASES = {
    alias: name
    for name, aliases in {
        "gpt-2": ("phi-2", "mpt", "olmo", "jais", "exaone4"),
        "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0", "jina-v5-nano"),
        "dbrx": ("smaug-bpe",),
        "qwen2": ("deepseek-r1-qwen", "stablelm2", "megrez", "kormo", "f2llmv2"),
        "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        "gpt-4o": ("llama4", "kanana2", "talkie", "minimax-m2"),
    }.items()
    for alias in aliases
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer that `tokenizer.ggml.pre` names; NotImplementedError for a name not known here."""
    kind = _KINDS.get(_ALIASES.get(name, name))
    if kind is None:
        known = ", ".join(sorted({*_KINDS, *_ALIASES}))
        raise NotImplementedError(f"tokenizer.ggml.pre {name!r} is not supported; known are {known}")
    return kind
