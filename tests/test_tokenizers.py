"""Tokenizers against transformers (goldens), sentencepiece and mistral-common."""

import base64
import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, processors

from paxserve.checkpoints.gguf import gguf_metadata
from paxserve.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_gguf
from paxserve.tokenizers.hf import HfTokenizer, byte_alphabet
from paxserve.tokenizers.pre_tokenizers import pre_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tokenizer_golden.json").read_text())
TEXTS: list[str] = GOLDEN["texts"]


def gguf_form(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """The metadata that a GGUF of the model would have. Mistral's user-defined pieces are those of score 0."""
    ids = range(processor.get_piece_size())
    scores = [processor.get_score(i) for i in ids]

    def token_type(i: int) -> int:
        kinds = ((processor.is_unknown(i), 2), (processor.is_control(i), 3), (processor.is_byte(i), 6))
        return next((kind for holds, kind in kinds if holds), 4 if scores[i] == 0 else 1)

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [token_type(i) for i in ids],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
    }


@pytest.fixture(scope="module")
def metadata(smollm2_gguf: Path) -> dict[str, Any]:
    return gguf_metadata(smollm2_gguf)


@pytest.fixture(scope="module")
def smollm2(metadata: dict[str, Any]) -> HfTokenizer:
    return tokenizer_from_gguf(metadata)


@pytest.fixture(scope="module", params=["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def mistral(mistral_data: Path, request: pytest.FixtureRequest) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(mistral_data / request.param))


class TestGgufByteLevel:
    def test_ids_equal_transformers(self, smollm2: HfTokenizer) -> None:
        assert [smollm2.encode(text) for text in TEXTS] == GOLDEN["smollm2_ids"]

    def test_decode_restores_every_text(self, smollm2: HfTokenizer) -> None:
        assert [smollm2.decode(smollm2.encode(text), skip_special_tokens=False) for text in TEXTS] == TEXTS

    def test_special_tokens(self, smollm2: HfTokenizer) -> None:
        assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.vocab_size) == (1, 2, 49152)
        assert smollm2.special_ids == frozenset(range(17))
        assert smollm2.decode(smollm2.encode("<|im_start|>user<|im_end|>")) == "user"
        assert smollm2.token_text(1) == "<|im_start|>"
        assert smollm2.token_text(smollm2.encode(" world")[0]) == " world"

    def test_random_ids_decode_as_the_library_does(self, smollm2: HfTokenizer) -> None:
        rng = random.Random(0)
        for _ in range(200):
            ids = [rng.randrange(49152) for _ in range(20)]
            assert smollm2.decode(ids) == smollm2._backend.decode(ids)

    def test_id_past_the_vocabulary_is_empty(self, smollm2: HfTokenizer) -> None:
        assert smollm2.token_bytes(49152) == b""

    @pytest.mark.parametrize("bos", [False, True])
    @pytest.mark.parametrize("eos", [False, True])
    def test_add_bos_and_eos(self, metadata: dict[str, Any], bos: bool, eos: bool) -> None:
        flags = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
        tokenizer = tokenizer_from_gguf({**metadata, **flags})
        assert tokenizer.encode("hi") == [1] * bos + tokenizer.encode("hi", add_special_tokens=False) + [2] * eos

    @pytest.mark.parametrize("name", sorted(GOLDEN["words"]))
    def test_pre_tokenizer_cuts_as_transformers_does(self, name: str) -> None:
        cut = pre_tokenizer(name).build()
        assert [[end for _, (_, end) in cut.pre_tokenize_str(text)] for text in TEXTS] == GOLDEN["words"][name]

    @pytest.mark.parametrize(
        ("name", "text", "words"),
        # Worked out by hand from the expressions in llama.cpp's src/llama-vocab.cpp.
        [
            ("gpt-2", "it's 1234  ok\n\n x", ["it", "'s", " 1234", " ", " ok", "\n\n", " x"]),
            ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
            ("smollm", "v12 34", ["v", "1", "2", " ", "3", "4"]),
            (
                "deepseek-llm",
                "Привет мир 12 汉字!\n\n",
                ["Привет", " мир", " ", "1", "2", " ", "汉字", "!", "\n", "\n"],
            ),
            ("deepseek-llm", "ab  ", ["ab", "  "]),
            ("deepseek-coder", "x=12 y", ["x", "=", "1", "2", " y"]),
            (
                "deepseek-v3",
                "1234 汉字かなabc (foo) ok\n",
                ["123", "4", " ", "汉字かな", "abc", " (", "foo", ")", " ok", "\n"],
            ),
        ],
    )
    def test_pre_tokenizer_by_hand(self, name: str, text: str, words: list[str]) -> None:
        cut = pre_tokenizer(name).build()
        assert [text[start:end] for _, (start, end) in cut.pre_tokenize_str(text)] == words

    def test_tekken_equals_mistral_common(self, mistral_data: Path) -> None:
        tekken = importlib.import_module("mistral_common.tokens.tokenizers.tekken")
        path = mistral_data / "tekken_240911.json"
        theirs = tekken.Tekkenizer.from_file(path)
        specials = theirs.num_special_tokens
        entries = json.loads(path.read_text())["vocab"][: theirs.n_words - specials]
        alphabet = {b: c for c, b in byte_alphabet().items()}
        words = ["".join(alphabet[b] for b in base64.b64decode(entry["token_bytes"])) for entry in entries]
        rank = {word: i for i, word in enumerate(words)}
        merges = [
            f"{left} {right}"
            for word in words
            for _, left, right in sorted(
                (rank[word[:cut]], word[:cut], word[cut:])
                for cut in range(1, len(word))
                if word[:cut] in rank and word[cut:] in rank
            )
        ]
        ours = tokenizer_from_gguf(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "tekken",
                "tokenizer.ggml.tokens": [f"<SPECIAL_{i}>" for i in range(specials)] + words,
                "tokenizer.ggml.token_type": [3] * specials + [1] * len(words),
                "tokenizer.ggml.merges": merges,
                "tokenizer.ggml.bos_token_id": theirs.bos_id,
            }
        )
        assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text, bos=True, eos=False) for text in TEXTS]

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"tokenizer.ggml.pre": "no-such"}, NotImplementedError, "'no-such'"),
            ({"tokenizer.ggml.model": "rwkv"}, NotImplementedError, "'rwkv'"),
            ({"tokenizer.ggml.bos_token_id": 49152}, ValueError, "49152"),
            ({"tokenizer.ggml.tokens": ["a", "a"]}, ValueError, "1 of them distinct"),
            ({"tokenizer.ggml.merges": ["ab"]}, ValueError, "'ab'"),
        ],
    )
    def test_refusals(self, metadata: dict[str, Any], change: dict[str, Any], error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            tokenizer_from_gguf({**metadata, **change})

    def test_no_vocabulary(self) -> None:
        with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model"):
            tokenizer_from_gguf({"general.architecture": "llama"})

    def test_bos_wanted_but_not_named(self, metadata: dict[str, Any]) -> None:
        without = {k: v for k, v in metadata.items() if k != "tokenizer.ggml.bos_token_id"}
        with pytest.raises(ValueError, match="names no BOS"):
            tokenizer_from_gguf({**without, "tokenizer.ggml.add_bos_token": True})


def spaced_texts(count: int) -> list[str]:
    rng = random.Random(1)
    return ["".join(rng.choices(" ab\n▁é🎉<0xA>", weights=[9] + [1] * 11, k=rng.randint(1, 70))) for _ in range(count)]


class TestSentencePiece:
    def test_gguf_form_equals_sentencepiece(self, mistral: sentencepiece.SentencePieceProcessor) -> None:
        ours = tokenizer_from_gguf(gguf_form(mistral))
        for text in TEXTS + spaced_texts(500):
            ids = mistral.encode(text)
            assert ours.encode(text, add_special_tokens=False) == ids
            assert ours.encode(text) == [1, *ids]
            assert ours.decode(ids) == mistral.decode(ids)

    def test_model_file_equals_sentencepiece(
        self, mistral: sentencepiece.SentencePieceProcessor, tmp_path: Path
    ) -> None:
        tokenizer = load_spm(mistral, tmp_path, {})
        for text in TEXTS + spaced_texts(100):
            ids = mistral.encode(text)
            assert tokenizer.encode(text) == [1, *ids]
            assert tokenizer.decode(ids) == mistral.decode(ids)

    def test_no_prefix_space(self, mistral: sentencepiece.SentencePieceProcessor) -> None:
        tokenizer = tokenizer_from_gguf({**gguf_form(mistral), "tokenizer.ggml.add_space_prefix": False})
        ids = tokenizer.encode("Hello there", add_special_tokens=False)
        assert tokenizer.token_text(ids[0]) == "Hello"
        assert tokenizer.decode(tokenizer.encode(" x")) == " x"

    def test_special_tokens_in_the_text(self, mistral: sentencepiece.SentencePieceProcessor, tmp_path: Path) -> None:
        expected = [1, *mistral.encode("Hi"), 2, 1, *mistral.encode(" you")]
        for tokenizer in (tokenizer_from_gguf(gguf_form(mistral)), load_spm(mistral, tmp_path, {})):
            assert tokenizer.encode("<s>Hi</s><s> you", add_special_tokens=False) == expected
            assert tokenizer.decode(expected, skip_special_tokens=False) == "<s> Hi</s><s>  you"
            assert tokenizer.special_ids >= {0, 1, 2}

    def test_bytes(self, mistral: sentencepiece.SentencePieceProcessor, tmp_path: Path) -> None:
        for tokenizer in (tokenizer_from_gguf(gguf_form(mistral)), load_spm(mistral, tmp_path, {})):
            assert tokenizer.token_bytes(mistral.piece_to_id("<0xE2>")) == b"\xe2"
            assert tokenizer.token_bytes(mistral.piece_to_id("▁the")) == b" the"
            assert tokenizer.token_bytes(tokenizer.vocab_size) == b""

    def test_config_beside_the_model(self, mistral: sentencepiece.SentencePieceProcessor, tmp_path: Path) -> None:
        size = mistral.get_piece_size()
        config = {
            "add_bos_token": False,
            "add_eos_token": True,
            "eos_token": {"content": "<|im_end|>"},
            "added_tokens_decoder": {str(size): {"content": "<|im_end|>", "special": True}},
            "chat_template": "{{ bos_token }}",
        }
        tokenizer = load_spm(mistral, tmp_path, config)
        assert tokenizer.encode("Hi<|im_end|>") == [*mistral.encode("Hi"), size, size]
        assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.vocab_size) == (size, 1, size + 1)
        assert tokenizer.token_text(size) == "<|im_end|>"
        assert tokenizer.chat_template == "{{ bos_token }}"

    @pytest.mark.parametrize(
        ("config", "error", "message"),
        [
            ({"legacy": False}, NotImplementedError, "legacy"),
            ({"eos_token": "<none>"}, ValueError, "'<none>'"),
            ({"added_tokens_decoder": {"99999": {"content": "<x>"}}}, ValueError, "99999"),
        ],
    )
    def test_refusals(
        self, mistral_data: Path, tmp_path: Path, config: dict[str, Any], error: type, message: str
    ) -> None:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(mistral_data / "tokenizer.model.v1"))
        with pytest.raises(error, match=message):
            load_spm(processor, tmp_path, config)

    def test_not_a_model(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.model").write_bytes(b"nothing of the kind")
        with pytest.raises(ValueError, match="not a SentencePiece model"):
            load_tokenizer(tmp_path)


def load_spm(processor: sentencepiece.SentencePieceProcessor, directory: Path, config: dict[str, Any]) -> Tokenizer:
    (directory / "tokenizer.model").write_bytes(processor.serialized_model_proto())
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


class TestTokenizerJson:
    @pytest.fixture
    def directory(self, smollm2: HfTokenizer, tmp_path: Path) -> Path:
        smollm2._backend.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def load(self, directory: Path, config: dict[str, Any]) -> Tokenizer:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = load_tokenizer(directory)
        assert tokenizer is not None
        return tokenizer

    def test_reloaded_equals_transformers(self, directory: Path) -> None:
        tokenizer = load_tokenizer(directory)
        assert tokenizer is not None
        assert [tokenizer.encode(text) for text in TEXTS] == GOLDEN["smollm2_ids"]
        assert tokenizer.bos_token_id is None
        assert tokenizer.chat_template is None

    def test_config(self, directory: Path) -> None:
        config = {
            "bos_token": "<|im_start|>",
            "eos_token": {"content": "<|im_end|>", "special": True},
            "add_bos_token": True,
            "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
        }
        tokenizer = self.load(directory, config)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (1, 2, "D")
        assert tokenizer.encode("hi") == [1, *tokenizer.encode("hi", add_special_tokens=False)]
        (directory / "chat_template.jinja").write_text("J")
        assert self.load(directory, config).chat_template == "J"

    def test_special_tokens_map(self, directory: Path) -> None:
        (directory / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
        assert self.load(directory, {}).eos_token_id == 2

    def test_post_processor_and_overrides(self, smollm2: HfTokenizer, tmp_path: Path) -> None:
        backend = tokenizers.Tokenizer.from_str(smollm2._backend.to_str())
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
        )
        backend.enable_truncation(2)
        backend.save(str(tmp_path / "tokenizer.json"))
        names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        bare = smollm2.encode("one two three four")
        assert self.load(tmp_path, names).encode("one two three four") == [1, *bare, 2]
        assert self.load(tmp_path, names | {"add_bos_token": False}).encode("one two three four") == [*bare, 2]
        assert self.load(tmp_path, names | {"add_eos_token": False}).encode("one two three four") == [1, *bare]

    def test_added_tokens(self, directory: Path) -> None:
        added = {"49152": {"content": "<tool>", "special": False}, "1": {"content": "<|im_start|>", "special": True}}
        tokenizer = self.load(directory, {"added_tokens_decoder": added})
        assert tokenizer.encode("<tool>") == [49152]
        assert tokenizer.decode([49152]) == "<tool>"
        with pytest.raises(ValueError, match="'<tool>' is token 50000"):
            self.load(directory, {"added_tokens_decoder": {"50000": added["49152"]}})

    def test_unknown_special_token(self, directory: Path) -> None:
        with pytest.raises(ValueError, match="'<none>'"):
            self.load(directory, {"eos_token": "<none>"})

    def test_unsupported_decoder(self, tmp_path: Path) -> None:
        backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
        backend.decoder = decoders.WordPiece()
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(NotImplementedError, match="WordPiece"):
            load_tokenizer(tmp_path)

    def test_malformed_files(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
            load_tokenizer(tmp_path)

    def test_malformed_config(self, directory: Path) -> None:
        (directory / "tokenizer_config.json").write_text("{")
        with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
            load_tokenizer(directory)

    def test_neither_file(self, tmp_path: Path) -> None:
        assert load_tokenizer(tmp_path) is None
