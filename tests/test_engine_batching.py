"""A request's tokens do not depend on what it is batched with, nor on buckets, chunks, pages, preemption or options.

32 requests of every kind are run by engines that differ in all of these; each must give what the dense model in numpy
gives for that request alone.
"""

import numpy as np
import pytest
from engine_models import write_random

from paxserve import LLM, SamplingParams
from paxserve.buckets import Bucket
from paxserve.metrics import EngineStats

MAX_MODEL_LEN = 64
COMMON = {"max_model_len": MAX_MODEL_LEN}
FEATURES = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 0, "frequency_penalty": 1.5, "min_tokens": 5},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.7, "logprobs": 2},
    {"temperature": 1.5, "min_p": 0.2, "logit_bias": {5: 2.0, 9: -50.0}, "prompt_logprobs": 0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "frequency_penalty": 0.7, "repetition_penalty": 0.8, "n": 2},
]


def requests():
    """[(prompt, params)], 32 of them."""
    rng = np.random.default_rng(7)
    result = []
    for index in range(32):
        prompt = rng.integers(3, 96, rng.integers(1, 41)).tolist()
        params = SamplingParams(**FEATURES[index % len(FEATURES)], max_tokens=int(rng.integers(6, 25)), seed=index)
        result.append((prompt, params))
    return result


@pytest.fixture(scope="module")
def expected(random_model):
    _, dense = random_model
    return [[dense.generate(prompt, params, i) for i in range(params.n)] for prompt, params in requests()]


def tokens_of(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def run(llm, priority=None):
    prompts, params = zip(*requests(), strict=True)
    return tokens_of(llm.generate(prompts, params, priority=priority))


def test_the_workload_tells_requests_apart(expected):
    """Otherwise what follows would show little."""
    assert len({tuple(sample) for samples in expected for sample in samples}) >= 34
    assert np.mean([len(set(sample)) / len(sample) for samples in expected for sample in samples]) > 0.6


def test_all_at_once_and_alone(random_model, xla_cache, expected):
    """Whole prompts in one chunk, all together; then some alone, in the smallest buckets."""
    llm = LLM(random_model[0], max_num_seqs=32, max_num_batched_tokens=64, compilation_cache_dir=xla_cache, **COMMON)
    assert run(llm) == expected
    assert Bucket(32, 32, decode=True) in llm.engine.stats.step_seconds
    assert llm.engine.stats.preemptions == 0
    llm.engine.stats = EngineStats()
    for (prompt, params), samples in list(zip(requests(), expected, strict=True))[: len(FEATURES)]:
        assert tokens_of(llm.generate([prompt], params)) == [samples]
    assert llm.engine.stats.step_seconds.keys() == {Bucket(2, 2, decode=True), Bucket(64, 32, decode=False)}


def test_under_preemption(tight_llm, expected):
    """A pool that holds one longest sequence, prompts in chunks of 16, priorities."""
    before = tight_llm.engine.stats.preemptions
    assert run(tight_llm, priority=np.random.default_rng(8).integers(0, 3, 32).tolist()) == expected
    assert run(tight_llm) == expected
    assert tight_llm.engine.stats.preemptions - before >= 4
    assert tight_llm.engine.groups.used_pages == 0


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 128, "num_pages": 7, "max_num_batched_tokens": 32, "scan_layers": True, "attention": "xla"},
        {"page_size": 16, "num_pages": 6, "attention": "reference", "async_scheduling": False},
    ],
    ids=str,
)
def test_other_options(random_model, small_engine, expected, options):
    llm = LLM(random_model[0], **{**small_engine, **COMMON, **options})
    assert run(llm) == expected


def test_other_requests_come_and_go(random_llm, random_model):
    """Requests that arrive, end and are aborted at every step of one long request leave it alone."""
    _, dense = random_model
    engine = random_llm.engine
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True, top_p=0.9)
    engine.add_request("watched", [5, 6, 7, 8, 9, 10, 11], params)
    rng = np.random.default_rng(9)
    passing, finished = {}, {}
    for number in range(10_000):
        if number % 3 == 0:
            passing[f"other {number}"] = None
            other = SamplingParams(max_tokens=int(rng.integers(1, 9)), temperature=float(rng.integers(0, 2)))
            engine.add_request(f"other {number}", rng.integers(0, 96, rng.integers(1, 30)).tolist(), other, priority=-1)
        if number % 4 == 0 and (running := [name for name in passing if name not in finished]):
            finished[running[0]] = engine.abort_request(running[0])
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        if "watched" in finished:
            break
    for name in passing:
        if name not in finished:
            engine.abort_request(name)
    assert len(passing) > 10
    assert finished["watched"].outputs[0].token_ids == dense.generate([5, 6, 7, 8, 9, 10, 11], params)


def test_a_request_id_can_be_used_again(random_llm, random_model):
    _, dense = random_model
    engine = random_llm.engine
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=6, seed=1)
        engine.add_request("again", [5, 6, 7], params)
        with pytest.raises(ValueError, match="request_id='again'"):
            engine.add_request("again", [5, 6, 7], params)
        outputs = [output for _ in range(12) for output in engine.step()]
        assert outputs[-1].outputs[0].token_ids == dense.generate([5, 6, 7], params)


def test_unseeded_draws_come_from_the_engine_seed_and_the_number(tmp_path, small_engine):
    write_random(tmp_path)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first, again, other = (
        tokens_of(LLM(tmp_path, seed=seed, **small_engine).generate([[5, 6]] * 3, params)) for seed in (0, 0, 1)
    )
    assert first == again
    assert len({tuple(sample) for (sample,) in first + other}) == 6
