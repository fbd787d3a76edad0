"""Pages in a running engine: what is freed never matters again, samples share their prompt, and the trace tells it all."""

import dataclasses
import functools
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from paxserve import LLM, SamplingParams
from paxserve.pages import NULL_PAGE


@pytest.fixture(scope="module")
def poisoned(tight_llm):
    """An engine in which, just before every step, all pages that no request can rely on are filled with NaN:
    the free ones, those taken for this step, whose content is still that of their last owner, and the null page."""
    engine = tight_llm.engine
    pool, runner = engine.groups.schedulers[0].pool, engine.runner
    events = []
    dispatch, trace = runner.dispatch, pool._trace
    num_layers = engine.source.config.num_layers

    @functools.partial(jax.jit, donate_argnums=0)
    def fill(kv_pages, unused):
        everywhere = jnp.tile(unused, num_layers).reshape(-1, *[1] * (kv_pages.ndim - 1))
        return jnp.where(everywhere, jnp.nan, kv_pages)

    def poison_and_dispatch(plan):
        unused = np.array([pool.refcount(page) == 0 for page in range(pool.num_pages)])
        unused[[event.page for event in events if event.kind == "allocate"]] = True
        unused[NULL_PAGE] = True
        events.clear()
        runner.state = dataclasses.replace(runner.state, kv_pages=fill(runner.state.kv_pages, unused))
        return dispatch(plan)

    runner.dispatch, pool._trace = poison_and_dispatch, events.append
    yield engine
    runner.dispatch, pool._trace = dispatch, trace
    runner.state = jax.tree.map(jnp.zeros_like, runner.state)


REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            lambda length, seed: np.random.default_rng(seed).integers(3, 96, length).tolist(),
            st.integers(1, 24),
            st.integers(0, 9),
        ),
        "seed": st.integers(0, 3),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "max_tokens": st.sampled_from([40, 25, 10, 1]),
        "ignore_eos": st.booleans(),
        "priority": st.integers(0, 1),
        "temperature": st.sampled_from([0.0, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.5]),
        "logprobs": st.sampled_from([None, None, 0]),
        "prompt_logprobs": st.sampled_from([None, None, 2]),
    }
)
SCRIPTS = st.lists(
    st.one_of(
        REQUESTS,
        REQUESTS,
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(1, 12)),
    ),
    min_size=6,
    max_size=24,
)


def test_freed_pages_never_matter(poisoned, random_model):
    """Random submits and aborts under preemption: every request gives what it gives alone."""
    _, dense = random_model
    engine = poisoned
    before = engine.stats.preemptions

    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # the engine goes from example to example: a failing one cannot be run again
        suppress_health_check=list(HealthCheck),
    )
    @given(SCRIPTS)
    def run(script):
        asked, ended = {}, {}

        def step():
            ended.update({output.request_id: output for output in engine.step() if output.finished})

        for action in script:
            match action:
                case ("step", count):
                    for _ in range(count):
                        step()
                case ("abort", number):
                    unfinished = [name for name in asked if name not in ended]
                    if unfinished:
                        name = unfinished[number % len(unfinished)]
                        ended[name] = engine.abort_request(name)
                case dict():
                    fields = dict(action)
                    prompt, priority = fields.pop("prompt"), fields.pop("priority")
                    name = str(len(asked))
                    asked[name] = prompt, SamplingParams(**fields)
                    engine.add_request(name, prompt, asked[name][1], priority)
        while engine.has_unfinished_requests():
            step()
        # What was aborted is handed out once more, by the next step; then there is nothing left.
        assert all(output.outputs == ended[output.request_id].outputs for output in engine.step())
        assert engine.step() == []

        assert ended.keys() == asked.keys()
        assert engine.groups.used_pages == 0
        for name, (prompt, params) in asked.items():
            for sample in ended[name].outputs:
                whole = dense.generate(prompt, params, sample.index)
                if sample.finish_reason == "abort":
                    assert sample.token_ids == whole[: len(sample.token_ids)]
                else:
                    assert sample.token_ids == whole
                if params.logprobs is not None:
                    check_logprobs(prompt, sample, dense)
            if params.prompt_logprobs is not None and ended[name].outputs[0].finish_reason != "abort":
                check_prompt_logprobs(ended[name], dense)

    run()
    assert engine.stats.preemptions - before >= 5
    assert engine.stats.compiles == 0


def check_logprobs(prompt, sample, dense):
    assert [list(entries) for entries in sample.logprobs] == [[token] for token in sample.token_ids]
    logprobs = dense.logprobs(prompt + sample.token_ids)[len(prompt) - 1 :]
    for entries, token, row in zip(sample.logprobs, sample.token_ids, logprobs, strict=False):
        np.testing.assert_allclose(entries[token].logprob, row[token], atol=2e-5)
        assert entries[token].rank == 1 + (row > row[token]).sum()


def check_prompt_logprobs(output, dense):
    tokens = output.prompt_token_ids
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(tokens)
    logprobs = dense.logprobs(tokens)
    for position in range(1, len(tokens)):
        entry = output.prompt_logprobs[position][tokens[position]]
        np.testing.assert_allclose(entry.logprob, logprobs[position - 1, tokens[position]], atol=2e-5)


def read_trace(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_samples_share_the_pages_of_their_prompt_and_the_trace_balances(random_model, small_engine, tmp_path):
    directory, dense = random_model
    file = tmp_path / "trace.jsonl"
    llm = LLM(directory, **small_engine, kv_trace=str(file))
    engine = llm.engine
    prompt = np.random.default_rng(0).integers(3, 96, 20).tolist()  # two full pages and half of one
    params = SamplingParams(n=3, max_tokens=7, seed=11, ignore_eos=True)
    used = []
    engine.add_request("shared", prompt, params)
    (output,) = [o for _ in range(40) for o in engine.step() if not used.append(pool_use(engine)) and o.finished]
    alone = [dataclasses.replace(params, n=1, seed=11 + index) for index in range(3)]
    assert [sample.token_ids for sample in output.outputs] == [dense.generate(prompt, one) for one in alone]
    assert [[sample.token_ids] for sample in output.outputs] == [
        [sample.token_ids for sample in one.outputs] for one in llm.generate([prompt] * 3, alone)
    ]
    # 26 tokens of each have KV: two pages in common, and each its own third, copied on its first write, and fourth.
    assert max(used) == 2 + 3 * 2
    engine.close()

    events = read_trace(file)
    shared = [event for event in events if event["owner"].startswith("shared")]
    kinds = Counter(event["kind"] for event in shared)
    assert kinds["share"] == 2 * 3
    assert kinds["copy"] == 2
    assert kinds["allocate"] == 3 + 2 + 3  # the prompt's, the copies, the fourth pages
    assert kinds["free"] == kinds["allocate"]
    assert all(event["source"] != event["page"] for event in shared if event["kind"] == "copy")
    owners = Counter()
    for event in events:
        assert event.keys() - {"source"} == {"kind", "page", "owner"}
        owners[event["page"]] += {"allocate": 1, "share": 1, "release": -1, "free": -1, "copy": 0}[event["kind"]]
        assert owners[event["page"]] >= 0
        assert (event["kind"] != "free") or owners[event["page"]] == 0
        assert (event["kind"] != "allocate") or owners[event["page"]] == 1
    assert not +owners
    assert NULL_PAGE not in owners


def pool_use(engine):
    return engine.groups.used_pages
