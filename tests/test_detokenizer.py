"""Streaming detokenization equals decoding at once; stop strings cut a stream wherever its increments fall."""

import itertools
import json
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paxserve.checkpoints.gguf import gguf_metadata
from paxserve.tokenizers import Detokenizer, StopStrings, Tokenizer, tokenizer_from_gguf
from paxserve.tokenizers.config import TokenizerConfig
from paxserve.tokenizers.spm import SpmTokenizer

TEXTS = json.loads((Path(__file__).parent / "golden" / "tokenizer_golden.json").read_text())["texts"]
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def sentencepiece_model(mistral_data: Path) -> bytes:
    return (mistral_data / "tokenizer.model.v1").read_bytes()


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "byte-level":
        return tokenizer_from_gguf(gguf_metadata(request.getfixturevalue("smollm2_gguf")))
    return SpmTokenizer(request.getfixturevalue("sentencepiece_model"), TokenizerConfig())


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """A token for every byte that the vocabulary has as a token of its own."""
    return [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1][:256]


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


class TestDetokenizer:
    @FEW
    @given(data=st.data(), skip=st.booleans())
    def test_any_ids(self, tokenizer: Tokenizer, byte_ids: list[int], data: st.DataObject, skip: bool) -> None:
        token = st.sampled_from(byte_ids) | st.integers(0, tokenizer.vocab_size) | st.sampled_from([0, 1, 2])
        ids = data.draw(st.lists(token, max_size=40))
        assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip)

    # SmolLM2's vocabulary lacks some control characters, and the bytes that begin most planes above the first two.
    @FEW
    @given(text=st.text(st.characters(max_codepoint=0x1FFFF, exclude_categories=["Cs", "Cc"]), max_size=30))
    def test_any_text(self, tokenizer: Tokenizer, text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(stream(tokenizer, ids, skip_special_tokens=False)) == text

    @pytest.mark.parametrize("text", TEXTS)
    def test_texts(self, tokenizer: Tokenizer, text: str) -> None:
        ids = tokenizer.encode(text)
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)

    def test_a_character_comes_out_whole(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("a𓀀b", add_special_tokens=False)
        pieces = [p for p in stream(tokenizer, ids) if p]
        assert pieces == ["a", "𓀀", "b"]

    def test_incomplete_tail_is_shown_at_the_end_only(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("a𓀀", add_special_tokens=False)[:-1]
        *pieces, last = stream(tokenizer, ids)
        assert "".join(pieces) == "a"
        assert last == "�"

    def test_broken_bytes_in_the_middle(self, tokenizer: Tokenizer) -> None:
        start = tokenizer.encode("𓀀", add_special_tokens=False)[:-1]
        ids = start + tokenizer.encode("z", add_special_tokens=False)
        text = "".join(stream(tokenizer, ids))
        assert text == tokenizer.decode(ids)
        assert "�" in text

    def test_continuing_a_prompt_keeps_the_space(self, sentencepiece_model: bytes) -> None:
        tokenizer = SpmTokenizer(sentencepiece_model, TokenizerConfig())
        ids = tokenizer.encode("Hello there", add_special_tokens=False)
        assert "".join(stream(tokenizer, ids)) == "Hello there"
        assert "".join(stream(tokenizer, ids[1:], starts_text=False)) == " there"
        assert "".join(stream(tokenizer, ids[1:])) == tokenizer.decode(ids[1:]) == "there"

    def test_decode_equals_sentencepiece_on_text(self, sentencepiece_model: bytes) -> None:
        theirs = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
        ours = SpmTokenizer(sentencepiece_model, TokenizerConfig())
        for text in TEXTS:
            assert "".join(stream(ours, theirs.encode(text))) == theirs.decode(theirs.encode(text))


class TestStopStrings:
    def feed(self, stops: StopStrings, pieces: list[str]) -> str:
        return "".join([*(stops.push(p) for p in pieces), stops.flush()])

    @pytest.mark.parametrize(
        ("stop", "text", "matched", "before", "included"),
        [
            (["END"], "one END two", "END", "one ", "one END"),
            (["END"], "one EN", None, "one EN", "one EN"),
            (["aab"], "aaab!", "aab", "a", "aaab"),
            (["\n\n", "stop"], "a\nb\n\nstop", "\n\n", "a\nb", "a\nb\n\n"),
            (["lo wor", "world"], "hello world", "lo wor", "hel", "hello wor"),
            (["b", "ab"], "xab", "b", "xa", "xab"),
            (["ab", "b"], "xab", "ab", "x", "xab"),
            (["é🎉"], "caffé🎉!", "é🎉", "caff", "caffé🎉"),
            ([], "anything", None, "anything", "anything"),
        ],
    )
    def test_cut_whatever_the_increments(
        self, stop: list[str], text: str, matched: str | None, before: str, included: str
    ) -> None:
        for width in (1, 2, 3, len(text)):
            pieces = [text[i : i + width] for i in range(0, len(text), width)]
            for include, expected in ((False, before), (True, included)):
                stops = StopStrings(stop, include_in_output=include)
                assert self.feed(stops, pieces) == expected
                assert stops.matched == matched

    def test_holds_back_only_what_may_become_a_stop_string(self) -> None:
        stops = StopStrings(["###", "<end>"])
        assert [stops.push(p) for p in ("a#", "#b", "<en", "d", "x", "#")] == ["a", "##b", "", "", "<endx", ""]
        assert stops.flush() == "#"
        assert StopStrings(["###"], include_in_output=True).push("a#") == "a#"

    @FEW
    @given(
        text=st.text("ab", max_size=20),
        stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
        cuts=st.lists(st.integers(0, 20), max_size=5),
        include=st.booleans(),
    )
    def test_against_a_search_of_every_prefix(self, text: str, stop: list[str], cuts: list[int], include: bool) -> None:
        edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
        found = next(((text[:n], s) for n in range(len(text) + 1) for s in stop if text[:n].endswith(s)), None)
        expected = text if found is None else found[0] if include else found[0].removesuffix(found[1])
        stops = StopStrings(stop, include_in_output=include)
        assert self.feed(stops, pieces) == expected
        assert stops.matched == (found and found[1])

    def test_nothing_after_a_match(self) -> None:
        stops = StopStrings(["."])
        assert (stops.push("a."), stops.push("b"), stops.flush()) == ("a", "", "")

    def test_empty_stop_string(self) -> None:
        with pytest.raises(ValueError, match="empty"):
            StopStrings(["a", ""])
