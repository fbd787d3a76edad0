"""SmolLM2-135M-Instruct through the whole engine, in float32, against transformers (tests/golden/make_smollm2.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

from paxserve import LLM, SamplingParams

CASES = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text())["cases"]
NEW_TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=8)


@pytest.fixture(scope="module")
def llm(smollm2_gguf, xla_cache, optimized):
    return LLM(
        smollm2_gguf,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        compilation_cache_dir=xla_cache,
    )


@pytest.fixture(scope="module")
def outputs(llm):
    """All prompts in one call: they take turns in eight slots, and are prefilled in chunks beside the others' decodes."""
    return llm.generate([{"prompt_token_ids": case["prompt_ids"]} for case in CASES], GREEDY)


def test_greedy_tokens(outputs, llm):
    assert [o.prompt_token_ids for o in outputs] == [case["prompt_ids"] for case in CASES]
    assert [o.outputs[0].token_ids for o in outputs] == [case["greedy_ids"] for case in CASES]
    assert llm.engine.stats.compiles == 0


def test_top_logits(outputs):
    """By their differences, since logprobs are logits less a constant; relative to the largest logit."""
    for output, case in zip(outputs, CASES, strict=True):
        for top in case["top_logits"]:
            entries = output.outputs[0].logprobs[top["step"]]
            found = np.array([entries[token].logprob for token in top["ids"]])
            golden = np.array(top["values"])
            assert list(entries) == top["ids"] or min(-np.diff(golden)) < 1e-3  # the order of near ties may differ
            np.testing.assert_allclose(found - found[0], golden - golden[0], atol=2e-3 * np.abs(golden).max())


def test_logprobs_are_normalised(outputs):
    for output in outputs:
        for entries in output.outputs[0].logprobs:
            assert 0.01 < sum(np.exp(entry.logprob) for entry in entries.values()) < 1 + 1e-5


def test_text_and_tokenizer(outputs, llm):
    tokenizer = llm.engine.tokenizer
    for output, case in zip(outputs, CASES, strict=True):
        assert tokenizer.encode(case["text"]) == case["prompt_ids"]
        assert output.outputs[0].text == tokenizer.decode(case["greedy_ids"])


def test_generate_from_text_and_chat(llm):
    """A few tokens of each: the prompt is what the golden says, and so are they."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    texts = [case for case in CASES if "messages" not in case]
    chats = [case for case in CASES if "messages" in case]
    outputs = [
        *llm.generate([case["text"] for case in texts], params),
        *llm.chat([case["messages"] for case in chats], params),
    ]
    for output, case in zip(outputs, texts + chats, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        assert output.outputs[0].token_ids == case["greedy_ids"][:3]
