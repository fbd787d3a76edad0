"""Drawing on the device against the same written in float64 numpy with sorting (dense_llama.py), and against statistics."""

import jax
import numpy as np
import pytest
from dense_llama import kept_tokens, log_softmax, next_token

from paxserve import sampler
from paxserve.pack import pack_sampling
from paxserve.request import Request
from paxserve.sampler import logprobs_of, sample
from paxserve.sampling_params import MAX_LOGPROBS, SamplingParams
from paxserve.scheduler import PlannedRow, StepPlan
from paxserve.sequence_output import token_logprobs

ROWS, VOCAB, CONTEXT = 1024, 32, 24  # one shape, compiled once
run_sampler = jax.jit(sample)
STOPS = frozenset({3, 4})


def sampling_batch(rows, seqs):
    """Of the only data group."""
    return jax.tree.map(lambda array: array[0], pack_sampling([StepPlan(rows)], seqs))


def draw(logits, requests):
    """(tokens, logprobs as numpy) of one step: a row per request, padded with rows that want nothing."""
    rows = tuple(PlannedRow(r, r.num_tokens - 1, 1, samples=True) for r in requests)
    padded = np.zeros((ROWS, VOCAB), np.float32)
    padded[: len(rows)] = logits
    history = np.random.default_rng(1).integers(0, VOCAB, (ROWS, CONTEXT), np.int32)  # rubbish past each context
    context_lens = np.zeros(ROWS, np.int32)
    for index, request in enumerate(requests):
        context_lens[index] = request.num_tokens
        history[index, : request.num_tokens] = request.tokens(0, request.num_tokens)
    tokens, logprobs = jax.device_get(
        run_sampler(padded, sampling_batch(rows, ROWS), history, np.arange(ROWS), context_lens)
    )
    return tokens[: len(rows)].tolist(), jax.tree.map(lambda a: a[: len(rows)], logprobs)


def request(params, prompt=(1, 2), output=(), seed=0):
    return Request("", list(prompt), params, STOPS, seed, output_token_ids=list(output))


def expected(logits, requests):
    return [
        next_token(row, r.params, r.prompt_token_ids, r.output_token_ids, STOPS, r.seed)
        for row, r in zip(logits, requests, strict=True)
    ]


def random_requests(rng, count):
    """Every field used by about half of the rows."""

    def maybe(value, default):
        return value if rng.random() < 0.5 else default

    for _ in range(count):
        params = SamplingParams(
            temperature=maybe(rng.uniform(0.3, 3), maybe(1.0, 0.0)),
            top_k=maybe(int(rng.integers(1, VOCAB + 5)), 0),
            top_p=maybe(rng.uniform(0.05, 1), 1.0),
            min_p=maybe(rng.uniform(0, 0.5), 0.0),
            presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
            frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
            repetition_penalty=maybe(rng.uniform(0.3, 3), 1.0),
            logit_bias=maybe({int(t): rng.uniform(-5, 5) for t in rng.integers(0, VOCAB, 4)}, None),
            min_tokens=int(rng.integers(0, 8)),
        )
        prompt, output = (rng.integers(0, VOCAB, rng.integers(first, 11)).tolist() for first in (1, 0))
        yield request(params, prompt, output, int(rng.integers(0, 2**64, dtype=np.uint64)))


@pytest.mark.parametrize("ties", [False, True])
def test_random_rows_match_numpy(ties):
    rng = np.random.default_rng(ties)
    requests = list(random_requests(rng, 600))
    logits = rng.normal(0, 3, (len(requests), VOCAB)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    assert draw(logits, requests)[0] == expected(logits, requests)


LOGITS = np.log(np.repeat([8, 4, 2, 1, 0.5], [1, 4, 6, 6, 15]) / 48).astype(np.float32)  # many ties


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, 32),
        ({"top_k": 1}, 1),
        ({"top_k": 2}, 5),  # the second most likely has three equals
        ({"top_k": 5}, 5),
        ({"top_k": 6}, 11),
        ({"top_p": 0.1}, 1),
        ({"top_p": 0.17}, 5),
        ({"top_p": 0.9}, 32),
        ({"min_p": 0.49}, 5),
        ({"min_p": 0.51}, 1),
        ({"min_p": 1.0}, 1),
        ({"min_p": 0.2, "top_p": 0.66}, 5),  # 24/36 of what min-p left
        ({"top_k": 5, "top_p": 0.33}, 1),  # 8/24 of what top-k left
        ({"temperature": 0.5, "top_p": 0.35}, 1),  # 64/162 at half the temperature
        ({"temperature": 2.0, "min_p": 0.6}, 5),  # sqrt(1/2) at twice the temperature
    ],
)
def test_distribution(fields, kept):
    """The tokens drawn with many seeds are the ones kept, as often as their probabilities say."""
    params = SamplingParams(**fields)
    x = np.float64(LOGITS) / params.temperature
    mask = kept_tokens(x, params)
    assert mask.sum() == kept
    assert mask[:kept].all()
    requests = [request(params, seed=seed) for seed in range(ROWS)]
    counts = np.bincount(draw(np.tile(LOGITS, (ROWS, 1)), requests)[0], minlength=VOCAB)
    probs = np.exp(log_softmax(np.where(mask, x, -np.inf)))
    assert counts[~mask].sum() == 0
    chi_square = ((counts - ROWS * probs)[mask] ** 2 / (ROWS * probs)[mask]).sum()
    freedom = kept - 1
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom)


def test_many_thresholds_per_pass(monkeypatch):
    """As on TPUs and GPUs, on floats of every size, the infinite ones and both zeros among them."""
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**32, (200, VOCAB), np.uint32)
    logits = bits.view(np.float32)
    is_denormal = np.abs(logits) < 1e-37  # 0 on some devices
    logits = np.where(np.isnan(logits) | is_denormal, 1.5, logits)
    logits[:, :4] = -np.inf, 0.0, -0.0, 3e38
    logits = rng.permuted(logits, axis=1)
    k = rng.integers(1, VOCAB + 3, 200)
    expected = logits >= np.take_along_axis(np.sort(logits)[:, ::-1], np.minimum(k, VOCAB)[:, None] - 1, axis=1)
    for per_pass in (1, 4):
        monkeypatch.setattr(sampler, "_bits_per_pass", lambda per_pass=per_pass: per_pass)
        np.testing.assert_array_equal(sampler._within_top_k(logits, k), expected)


def test_positions_draw_independently():
    params = SamplingParams()
    tokens = [
        draw(np.tile(LOGITS, (600, 1)), [request(params, [1] * n, seed=s) for s in range(600)])[0] for n in (5, 6)
    ]
    counts = np.zeros((2, 2))
    for first, second in zip(*tokens, strict=True):
        counts[first >= 11, second >= 11] += 1
    outer = np.outer(counts.sum(1), counts.sum(0)) / counts.sum()
    assert ((counts - outer) ** 2 / outer).sum() < 10


def test_draws_depend_on_seed_and_position_alone():
    rng = np.random.default_rng(2)
    requests = list(random_requests(rng, 200))
    logits = rng.normal(0, 3, (200, VOCAB)).astype(np.float32)
    together, _ = draw(logits, requests)
    order = rng.permutation(200)
    assert draw(logits[order], [requests[i] for i in order])[0] == [together[i] for i in order]
    alone = [draw(logits[i : i + 1], requests[i : i + 1])[0][0] for i in range(30)]
    assert alone == together[:30]


def test_both_halves_of_the_seed_count():
    flat = np.zeros((4, VOCAB), np.float32)
    params = SamplingParams()
    draws = [
        [draw(flat[:1], [request(params, [1] * n, seed=s)])[0][0] for n in range(1, 13)]
        for s in (7, 8, 7 + 2**32, 7 + 2**63, 7)
    ]
    assert draws[4] == draws[0]
    assert len({tuple(d) for d in draws}) == 4


def test_greedy_rows_do_not_notice_their_neighbours():
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (2, VOCAB)).astype(np.float32)
    greedy = request(SamplingParams(temperature=0))
    wild = request(SamplingParams(top_k=3, top_p=0.5, min_p=0.1, presence_penalty=2, logit_bias={5: 9}, logprobs=3))
    tokens, _ = draw(logits, [greedy, wild])
    assert tokens[0] == np.argmax(logits[0])


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-38, 1e-60])
def test_small_temperatures_approach_greedy(temperature):
    logits = np.random.default_rng(4).normal(0, 30, (50, VOCAB)).astype(np.float32)
    requests = [request(SamplingParams(temperature=temperature, top_p=0.9, top_k=9), seed=s) for s in range(50)]
    assert draw(logits, requests)[0] == logits.argmax(-1).tolist()


def test_large_logits_do_not_overflow():
    logits = np.full((1, VOCAB), -3e38, np.float32)
    logits[0, 9] = 3e38
    for params in (SamplingParams(), SamplingParams(temperature=0.1, top_p=0.5), SamplingParams(min_p=0.1, top_k=2)):
        assert draw(logits, [request(params)])[0] == [9]


def test_barred_tokens_are_never_drawn():
    """-inf in logit_bias, with everything else in use."""
    bars = dict.fromkeys(range(1, VOCAB - 1), -np.inf)
    params = SamplingParams(logit_bias=bars, top_k=20, top_p=0.99, repetition_penalty=1.5, frequency_penalty=-1)
    tokens, _ = draw(np.zeros((300, VOCAB)), [request(params, output=[5, 6], seed=s) for s in range(300)])
    assert set(tokens) == {0, VOCAB - 1}


def test_logprobs_are_of_the_unmodified_logits():
    rng = np.random.default_rng(5)
    logits = np.round(rng.normal(0, 3, (40, VOCAB)), 1).astype(np.float32)  # some ties
    params = SamplingParams(logprobs=5, temperature=2, top_k=20, repetition_penalty=2, logit_bias={1: 3.0})
    tokens, logprobs = draw(logits, [request(params, seed=s) for s in range(40)])
    check_logprobs(logprobs, logits, tokens)


def test_logprobs_of_a_vocabulary_smaller_than_the_most_that_can_be_asked():
    logits = np.random.default_rng(6).normal(0, 3, (4, 7)).astype(np.float32)
    tokens = [0, 3, 6, 2]
    logprobs = jax.device_get(logprobs_of(logits, np.array(tokens)))
    check_logprobs(logprobs, logits, tokens)
    for entries in token_logprobs(logprobs, range(4), tokens, MAX_LOGPROBS, None):
        assert sorted(entries) == list(range(7))
        assert [entry.rank for entry in entries.values()] == list(range(1, 8))


def check_logprobs(logprobs, logits, tokens):
    top = min(MAX_LOGPROBS, logits.shape[1])
    for row, token in enumerate(tokens):
        wanted = log_softmax(np.float64(logits[row]))
        ids, values = logprobs.top_ids[row], logprobs.top_logprobs[row]
        assert ids[top:].tolist() == [-1] * (MAX_LOGPROBS - top)
        assert len(set(ids[:top].tolist())) == top
        np.testing.assert_allclose(values[:top], np.sort(wanted)[::-1][:top], atol=2e-6)
        np.testing.assert_allclose(values[:top], wanted[ids[:top]], atol=2e-6)
        np.testing.assert_allclose(logprobs.token_logprobs[row], wanted[token], atol=2e-6)
        assert logprobs.token_ranks[row] == 1 + (logits[row] > logits[row, token]).sum()


def test_unused_features_cost_nothing():
    """A step of greedy rows alone runs none of the passes over the vocabulary that the features need."""
    rows = np.zeros(2, np.int32)
    history = np.zeros((2, CONTEXT), np.int32)
    closed = jax.make_jaxpr(sample)(np.zeros((2, VOCAB), np.float32), sampling_batch((), 2), history, rows, rows)
    outside = {equation.primitive.name for equation in closed.jaxpr.eqns}
    assert "cond" in outside
    assert not outside & {"while", "scan", "scatter-add", "gather", "top_k", "exp", "random_bits", "threefry2x32"}
