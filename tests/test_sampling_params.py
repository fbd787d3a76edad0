"""Every field of SamplingParams: a bad value is refused by name, a good one is applied by the whole engine."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from engine_models import END, LETTERS, RECITED

from paxserve import SamplingParams

BASE = SamplingParams(max_tokens=24, seed=1, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 5, 6]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 1.5, "2", None]),
        ("temperature", [-0.1, math.nan, math.inf, "1", None]),
        ("top_k", [-2, 2.5, 2**31, "5", None]),
        ("top_p", [0, -0.5, 1.01, math.nan, None]),
        ("min_p", [-0.1, 1.1, math.nan, None]),
        ("seed", [2**64, -(2**63) - 1, 1.5, "1"]),
        ("presence_penalty", [-2.1, 2.1, math.nan, None]),
        ("frequency_penalty", [-2.1, 2.1, math.nan, None]),
        ("repetition_penalty", [0, -1, math.inf, math.nan, None]),
        ("logit_bias", [{1: math.nan}, {1: math.inf}, {1: 1e39}]),
        ("max_tokens", [0, -1, 2.5, "7"]),
        ("min_tokens", [-1, 17, 1.5, None]),
        ("stop", ["", ["a", ""], [1], [b"a"]]),
        ("stop_token_ids", [["a"], [1.5]]),
        ("logprobs", [-1, 21, 1.5, "3"]),
        ("prompt_logprobs", [-1, 21, 1.5, "3"]),
    ],
)
def test_bad_values_are_refused(field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{field}="):
            SamplingParams(**{field: value})


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match=r"^stop=.*detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_accepted_spellings():
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(logit_bias={"7": 1}).logit_bias == {7: 1.0}  # as in JSON
    assert SamplingParams(n=np.int64(2), temperature=np.float32(0.5)).n == 2
    assert SamplingParams(seed=-1).seed == -1


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 0},
        {"temperature": 2.0},
        {"top_k": 4},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"seed": 2},
        {"seed": 1 + 2**40},
        {"seed": -5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"repetition_penalty": 4.0},
        {"repetition_penalty": 0.5},
        {"logit_bias": {20: 3.0, 19: -math.inf, 60: 2.5}},
        {"max_tokens": 7},
    ],
    ids=str,
)
def test_field_is_applied(random_llm, random_model, field):
    """It gives what the dense model in numpy gives with it, and that is not what comes without it."""
    _, dense = random_model
    params = dataclasses.replace(BASE, **field)
    (output,) = random_llm.generate([PROMPT], params)
    assert output.outputs[0].token_ids == dense.generate(PROMPT, params)
    assert output.outputs[0].token_ids != dense.generate(PROMPT, BASE)
    assert output.outputs[0].finish_reason == "length"


def test_n(random_llm, random_model):
    _, dense = random_model
    (output,) = random_llm.generate([PROMPT], dataclasses.replace(BASE, n=6))  # more than run at a time
    assert [sample.index for sample in output.outputs] == list(range(6))
    alone = [dense.generate(PROMPT, dataclasses.replace(BASE, seed=1 + i)) for i in range(6)]
    assert [sample.token_ids for sample in output.outputs] == alone
    assert len({tuple(tokens) for tokens in alone}) == 6


def test_stop_token_ids_and_min_tokens(random_llm, random_model):
    _, dense = random_model
    free = dense.generate(PROMPT, BASE)
    stop = free[2]
    (output,) = random_llm.generate([PROMPT], dataclasses.replace(BASE, stop_token_ids=[stop, free[-1]]))
    (sample,) = output.outputs
    assert sample.token_ids == free[: free.index(stop) + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)

    later = dataclasses.replace(BASE, stop_token_ids=[stop], min_tokens=10, logit_bias={stop: 6.0})
    (output,) = random_llm.generate([PROMPT], later)
    (sample,) = output.outputs
    assert sample.token_ids == dense.generate(PROMPT, later)
    assert stop not in sample.token_ids[:10]
    assert sample.token_ids[-1] == stop  # barred, not dropped: as soon as it may come, it does
    assert len(sample.token_ids) < BASE.max_tokens


def test_min_tokens_bars_the_end_of_the_model(reciting_llm):
    (output,) = reciting_llm.generate(["Y"], SamplingParams(max_tokens=9, min_tokens=5))
    assert len(output.outputs[0].token_ids) >= 5
    assert END not in output.outputs[0].token_ids[:5]


def test_max_tokens_none_runs_to_the_end_of_the_context(reciting_llm):
    (output,) = reciting_llm.generate(["ab"], SamplingParams(max_tokens=None, ignore_eos=True, detokenize=False))
    (sample,) = output.outputs
    assert len(sample.token_ids) == reciting_llm.engine.limits.max_model_len - 2
    assert sample.finish_reason == "length"


def recite(llm, prompt, **fields):
    """(text, finish_reason, stop_reason, token_ids), and the text after every step, which must only ever grow."""
    texts = []
    for output in llm.stream([prompt], SamplingParams(**{"max_tokens": 40, "temperature": 0, **fields})):
        (sample,) = output.outputs
        texts.append(sample.text)
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == sample.text
    return sample, texts


def test_eos_and_ignore_eos(reciting_llm):
    sample, _ = recite(reciting_llm, "W")
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("XYZ", "stop", None)
    assert sample.token_ids == [RECITED.index(letter) for letter in ("X", "Y", "Z", "</s>")]
    sample, _ = recite(reciting_llm, "W", ignore_eos=True, max_tokens=6)
    assert (sample.text, sample.finish_reason) == ("XYZ01", "length")


def test_skip_special_tokens(reciting_llm):
    assert recite(reciting_llm, "y")[0].text == "zéABCDEFGHIJKLMNOPQRSTUVWXYZ"
    sample, _ = recite(reciting_llm, "y", skip_special_tokens=False, max_tokens=5)
    assert sample.text == "zé<x>A"


def test_detokenize(reciting_llm):
    sample, _ = recite(reciting_llm, "a", detokenize=False, max_tokens=5)
    assert sample.text == ""
    assert sample.token_ids == [RECITED.index(letter) for letter in "bcdef"]


def test_text_comes_in_whole_characters(reciting_llm):
    _, texts = recite(reciting_llm, "x", max_tokens=6)
    assert texts == ["y", "yz", "yz", "yzé", "yzé", "yzéA"]


def test_a_character_cut_off_at_the_end_is_replaced(reciting_llm):
    _, texts = recite(reciting_llm, "x", max_tokens=3)
    assert texts == ["y", "yz", "yz\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize(
    ("stop", "text", "reason", "num_tokens"),
    [
        ("c", "b", "c", 2),
        ("bcd", "", "bcd", 3),
        (["xyz", "fg", "efgh"], "bcde", "fg", 6),
        ("zéA", LETTERS[1:25], "zéA", 29),
        (["</s>"], LETTERS[1:] + "éABCDEFGHIJKL", None, 40),
    ],
)
def test_stop(reciting_llm, stop, text, reason, num_tokens):
    sample, texts = recite(reciting_llm, "a", stop=stop)
    assert sample.text == text
    assert (sample.finish_reason, sample.stop_reason) == (("stop", reason) if reason else ("length", None))
    assert len(sample.token_ids) == num_tokens
    assert all(text.startswith(partial) for partial in texts)  # nothing of the stop string ever came out


def test_include_stop_str_in_output(reciting_llm):
    sample, texts = recite(reciting_llm, "a", stop="efg", include_stop_str_in_output=True)
    assert texts == ["b", "bc", "bcd", "bcde", "bcdef", "bcdefg"]
    assert sample.stop_reason == "efg"
    c = RECITED.index("c")
    assert recite(reciting_llm, "a", stop_token_ids=[c])[0].text == "b"
    assert recite(reciting_llm, "a", stop_token_ids=[c], include_stop_str_in_output=True)[0].text == "bc"


def test_text_held_back_for_a_stop_string_comes_out_when_it_is_none(reciting_llm):
    sample, texts = recite(reciting_llm, "a", stop=["cdx", "ghi!"], max_tokens=7)
    assert texts == ["b", "b", "b", "bcde", "bcdef", "bcdef", "bcdefgh"]
    assert sample.finish_reason == "length"


def test_a_stop_string_completed_by_the_last_token_is_the_reason(reciting_llm):
    sample, _ = recite(reciting_llm, "a", stop="de", max_tokens=4)
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("bc", "stop", "de")


def test_stop_strings_wait_for_min_tokens(reciting_llm):
    sample, _ = recite(reciting_llm, "a", stop=["c", "g"], min_tokens=3)
    assert (sample.text, sample.stop_reason) == ("bcdef", "g")


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_and_prompt_logprobs(random_llm, random_model, count):
    _, dense = random_model
    params = dataclasses.replace(BASE, logprobs=count, prompt_logprobs=count, max_tokens=5)
    (output,) = random_llm.generate([PROMPT], params)
    (sample,) = output.outputs
    tokens = PROMPT + sample.token_ids
    wanted = dense.logprobs(tokens)
    assert output.prompt_logprobs[0] is None
    entries = output.prompt_logprobs + sample.logprobs
    assert len(entries) == len(tokens)
    for position in range(1, len(tokens)):
        check_entries(entries[position], wanted[position - 1], tokens[position], count)
    total = sum(entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True))
    assert sample.cumulative_logprob == pytest.approx(total)


def check_entries(entries, logprobs, token, count):
    """The `count` most likely tokens, most likely first, and the token itself; ranks as if all were sorted."""
    likely = np.argsort(-logprobs)
    assert list(entries) == list(dict.fromkeys([*likely[:count].tolist(), token]))
    for other, entry in entries.items():
        assert entry.logprob == pytest.approx(logprobs[other], abs=2e-5)
        assert entry.rank == 1 + likely.tolist().index(other)


def test_no_logprobs_unless_asked(random_llm):
    (output,) = random_llm.generate([PROMPT], BASE)
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_decoded_tokens_of_logprobs(reciting_llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=0)
    (output,) = reciting_llm.generate(["xy"], params)
    decoded = [entry.decoded_token for entries in output.outputs[0].logprobs for entry in entries.values()]
    assert decoded == ["z", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}", "<x>"]
    assert [entry.decoded_token for entry in output.prompt_logprobs[1].values()] == ["y"]
