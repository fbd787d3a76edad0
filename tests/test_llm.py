"""`LLM` as a user meets it: prompts, order, streams, chat, refusals, priorities, aborts, pool sizes."""

import dataclasses

import numpy as np
import pytest
from dense_deepseek import DenseDeepSeek

from paxserve import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def assert_idle(llm):
    assert not llm.engine.has_unfinished_requests()
    assert not llm.engine.groups.has_work
    assert llm.engine.groups.used_pages == 0


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("abc", ["defg"]),
        (["abc", "fg"], ["defg", "hijk"]),
        (("abc",), ["defg"]),
        ({"prompt": "abc"}, ["defg"]),
        ({"prompt_token_ids": [1, 2, 3]}, ["defg"]),
        ([1, 2, 3], ["defg"]),
        ([[1, 2, 3], [6]], ["defg", "ghij"]),
        (["abc", {"prompt_token_ids": [6]}, [1], {"prompt": "x"}], ["defg", "ghij", "bcde", "yzé"]),
        ([], []),
    ],
)
def test_prompt_forms(reciting_llm, prompts, expected):
    assert texts(reciting_llm.generate(prompts, GREEDY)) == expected


def test_outputs_say_what_was_asked(reciting_llm):
    by_text, by_ids = reciting_llm.generate(["abc", {"prompt_token_ids": [1, 2, 3]}], GREEDY)
    assert (by_text.prompt, by_text.prompt_token_ids) == ("abc", [1, 2, 3])
    assert (by_ids.prompt, by_ids.prompt_token_ids) == (None, [1, 2, 3])
    assert by_text.request_id != by_ids.request_id
    assert by_text.finished
    assert by_text.outputs[0].index == 0
    (metrics,) = by_text.metrics
    assert metrics.num_generated_tokens == 4
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.ttft >= 0
    assert metrics.tpot >= 0


def test_default_params_draw_16_tokens(reciting_llm):
    (output,) = reciting_llm.generate("a")
    assert output.outputs[0].text == "bcdefghijklmnopq"


def test_params_for_each_prompt_and_results_in_order(reciting_llm):
    """The last to be asked ends first."""
    lengths = [20, 9, 5, 2, 1, 12]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in lengths]
    outputs = reciting_llm.generate([[1]] * len(lengths), params, use_tqdm=True)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths


@pytest.mark.parametrize("given", [{"params": [GREEDY]}, {"params": GREEDY, "priority": [0, 1, 2]}])
def test_counts_must_agree(reciting_llm, given):
    with pytest.raises(ValueError, match=r"(1 params|3 priority) for 2 prompts"):
        reciting_llm.generate(["a", "b"], **given)
    assert_idle(reciting_llm)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", GREEDY, "empty"),
        ([[]], GREEDY, "empty"),
        ([1] * 128, GREEDY, "128 tokens.*max_model_len"),
        ([[1, 999]], GREEDY, "999, outside the vocabulary"),
        ([[-1]], GREEDY, "-1, outside the vocabulary"),
        ({"prompt": "a", "prompt_token_ids": [1]}, GREEDY, "give either"),
        ({"multi_modal_data": 1}, GREEDY, "multi_modal_data"),
        ("a", SamplingParams(logit_bias={999: 1.0}), "logit_bias.*999, outside the vocabulary"),
        ("a", SamplingParams(stop_token_ids=[-7]), "stop_token_ids.*-7, outside the vocabulary"),
    ],
)
def test_refusals_leave_the_engine_usable(reciting_llm, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        reciting_llm.generate(prompt, params)
    with pytest.raises(ValueError, match=message):  # in the middle of good ones
        reciting_llm.generate(
            ["a", *(prompt if isinstance(prompt, list) and prompt[0] != 1 else [prompt]), "b"], params
        )
    assert_idle(reciting_llm)
    assert texts(reciting_llm.generate("abc", GREEDY)) == ["defg"]


def test_what_a_model_without_tokenizer_refuses(random_llm):
    for call in (
        lambda: random_llm.generate("text"),
        lambda: random_llm.generate([[5]], SamplingParams(stop="x")),
        lambda: random_llm.chat([{"role": "user", "content": "hi"}]),
    ):
        with pytest.raises(ValueError, match="has no tokenizer"):
            call()
    (output,) = random_llm.generate([[5]], SamplingParams(logprobs=1))
    assert output.outputs[0].text == ""
    assert {entry.decoded_token for entry in output.outputs[0].logprobs[0].values()} == {None}


def test_a_bias_for_every_token(reciting_llm):
    vocab = reciting_llm.engine.source.config.vocab_size
    bias = dict.fromkeys(range(vocab), 0.0)
    assert texts(reciting_llm.generate("abc", dataclasses.replace(GREEDY, logit_bias=bias))) == ["defg"]


def test_stream_grows_and_ends_like_generate(reciting_llm):
    prompts = ["abc", "q", "X"]
    params = SamplingParams(temperature=0, max_tokens=12)
    lengths = {}
    last = {}
    for output in reciting_llm.stream(prompts, params):
        (sample,) = output.outputs
        before, text = lengths.get(output.request_id, (0, ""))
        assert len(sample.token_ids) == before + 1
        assert sample.text.startswith(text)
        assert output.finished == (sample.finish_reason is not None)
        assert output.request_id not in last or not last[output.request_id].finished
        lengths[output.request_id] = len(sample.token_ids), sample.text
        last[output.request_id] = output
    ended = [last[name] for name in sorted(last, key=int)]
    assert [o.outputs for o in ended] == [o.outputs for o in reciting_llm.generate(prompts, params)]


def test_leaving_a_stream_early_aborts(reciting_llm):
    for seen in (0, 1, 3, 4):  # after 4: the two short ones have ended in one step, and only one of them was seen
        stream = reciting_llm.stream(["a", "b", "c"], [dataclasses.replace(GREEDY, max_tokens=n) for n in (30, 2, 2)])
        for _ in range(seen):
            next(stream)
        stream.close()
        assert_idle(reciting_llm)
    assert texts(reciting_llm.generate("abc", GREEDY)) == ["defg"]


def test_streams_can_be_read_in_turns(reciting_llm):
    first = reciting_llm.stream(["a"], SamplingParams(temperature=0, max_tokens=6))
    second = reciting_llm.stream(["m"], SamplingParams(temperature=0, max_tokens=3))
    next(first)
    assert texts(reciting_llm.generate("abc", dataclasses.replace(GREEDY, max_tokens=10))) == ["defghijklm"]
    assert [output.outputs[0].text for output in second][-1] == "nop"
    assert [output.outputs[0].text for output in first][-1] == "bcdefg"
    assert_idle(reciting_llm)


def test_chat(reciting_llm):
    conversation = [{"role": "user", "content": "yz"}, {"role": "user", "content": "ab"}]
    (output,) = reciting_llm.chat(conversation, GREEDY)
    assert output.prompt_token_ids == reciting_llm.engine.tokenizer.encode("yzabA")
    assert output.outputs[0].text == "BCDE"
    outputs = reciting_llm.chat([conversation, conversation[1:]], GREEDY, add_generation_prompt=False)
    assert texts(outputs) == ["cdef", "cdef"]
    (output,) = reciting_llm.chat(conversation, GREEDY, chat_template="{{ messages[0].content }}</s>x")
    assert texts([output]) == ["yzé"]
    assert len(output.prompt_token_ids) == 4  # special tokens of a template are tokens
    with pytest.raises(ValueError, match="messages is empty"):
        reciting_llm.chat([], GREEDY)


def test_priorities_go_first(reciting_llm):
    """Ten requests for four slots, the last ones the most urgent."""
    outputs = reciting_llm.generate(["a"] * 10, GREEDY, priority=list(range(10, 0, -1)))
    started = [output.metrics[0].first_scheduled_time for output in outputs]
    assert started == sorted(started, reverse=True)
    assert started[0] > started[-1]
    outputs = reciting_llm.generate(["a"] * 10, GREEDY)
    started = [output.metrics[0].first_scheduled_time for output in outputs]
    assert started == sorted(started)


@pytest.mark.parametrize("steps", range(7))
def test_abort_at_any_time(reciting_llm, steps):
    engine = reciting_llm.engine
    long = dataclasses.replace(GREEDY, max_tokens=20, n=2, stop="bcdefghijklmnop!")
    engine.add_request("aborted", [1] * 40, long)  # three chunks of prompt
    engine.add_request("kept", [1, 2, 3], GREEDY)
    outputs = [output for _ in range(steps) for output in engine.step()]
    output = engine.abort_request("aborted")
    assert output.finished
    for sample in output.outputs:
        assert sample.finish_reason == "abort"
        assert sample.text == "bcdefghijklmnop"[: len(sample.token_ids)]  # what was held back, too
    with pytest.raises(KeyError):
        engine.abort_request("aborted")
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {o.outputs[0].text for o in outputs if o.request_id == "kept" and o.finished} == {"defg"}
    engine.step()
    assert_idle(reciting_llm)


def test_nothing_compiles_after_warm_up(tight_llm):
    """Sampling of every kind, logprobs, samples that share pages, preemption."""
    params = SamplingParams(max_tokens=30, seed=0, ignore_eos=True)
    kinds = [
        {},
        {"temperature": 0, "logprobs": 3},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"presence_penalty": 1, "repetition_penalty": 1.2, "n": 3},
        {"prompt_logprobs": 20, "logit_bias": {4: 1.0}, "min_tokens": 3, "stop_token_ids": [9]},
    ]
    stats = tight_llm.engine.stats
    before = stats.preemptions, stats.steps
    prompts = [np.random.default_rng(i).integers(3, 96, 5 * i + 3).tolist() for i in range(5)]
    tight_llm.generate(prompts * 2, [dataclasses.replace(params, **kind) for kind in kinds] * 2)
    assert stats.preemptions > before[0]
    assert stats.steps > before[1]
    assert stats.compiles == 0


def test_stats_add_up(reciting_llm):
    engine = reciting_llm.engine
    before = dataclasses.replace(engine.stats)
    reciting_llm.generate([[1] * 40, [2] * 3], dataclasses.replace(GREEDY, max_tokens=5, ignore_eos=True))
    stats = engine.stats
    assert stats.generated_tokens - before.generated_tokens == 10
    assert stats.prompt_tokens - before.prompt_tokens == 43
    assert stats.scheduled_tokens - before.scheduled_tokens == 43 + 2 * 4
    assert sum(map(len, stats.step_seconds.values())) == stats.steps
    assert 0 < stats.padding_share < 1
    assert stats.peak_pages >= 6
    assert stats.host_us_per_step > 0


def test_pool_of_so_many_pages_or_bytes(random_model, small_engine):
    llm = LLM(random_model[0], **small_engine, num_pages=9)
    assert llm.engine.limits.num_pages == 9
    assert llm.engine.limits.max_model_len == 64  # what the pool holds, where the model could do 128
    per_token = (
        24 + 16 if isinstance(random_model[1], DenseDeepSeek) else 2 * 2 * 64
    )  # latent and key, or K and V of 2 heads
    bytes_per_page = 2 * 8 * per_token * 4  # layers, page size, float32
    assert llm.engine.runner.state.kv_pages.nbytes == 9 * bytes_per_page
    llm = LLM(random_model[0], **small_engine, kv_cache_bytes=9 * bytes_per_page + 5)
    assert llm.engine.limits.num_pages == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 65, "num_pages": 9}, "9 pages holds 64 tokens.*max_model_len=65"),
        ({"max_model_len": 200}, "max_model_len=200.*128"),
        ({"num_pages": 1}, "1 pages"),
        ({"num_pages": 0}, "num_pages=0"),
        ({"kv_cache_bytes": 100}, "0 pages"),
        ({"num_pages": 9, "kv_cache_bytes": 10**6}, "num_pages and kv_cache_bytes"),
        ({"max_num_seqs": 32}, "max_num_batched_tokens"),
        ({"attention": "flash"}, "attention='flash'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"page_size": 0}, "page_size=0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"memory_fraction": 0.0}, "memory_fraction"),
        ({"load_format": "pickle"}, "load_format='pickle'"),
    ],
)
def test_bad_options_are_refused(random_model, small_engine, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(random_model[0], **{**small_engine, **options})


def test_unknown_options_are_refused(random_model):
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        LLM(random_model[0], gpu_memory_utilization=0.9)


def test_a_request_aborted_from_outside_ends_its_stream(random_llm):
    stream = random_llm.stream([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=20, ignore_eos=True))
    first = next(stream)
    random_llm.engine.abort_request(first.request_id)
    ends = {output.request_id: output for output in stream if output.finished}
    assert [output.outputs[0].finish_reason for output in ends.values()] == ["abort", "length"]


@pytest.mark.parametrize("prompt", [[1, 2.5], [1, None], {"prompt_token_ids": ["a"]}])
def test_what_is_no_token_id_is_refused(random_llm, prompt):
    with pytest.raises(ValueError, match="token ids"):
        random_llm.generate(prompt)


def test_token_ids_may_come_from_numpy(random_llm):
    params = SamplingParams(temperature=0, max_tokens=3)
    (array,), (ids,) = random_llm.generate(np.array([1, 2, 3]), params), random_llm.generate([1, 2, 3], params)
    assert array.prompt_token_ids == [1, 2, 3]
    assert array.outputs[0].token_ids == ids.outputs[0].token_ids
