"""Run by test_mesh.py on 8 devices: a model on every mesh of them gives the tokens that it gives on one."""

import itertools
import sys

import jax
import numpy as np

from paxserve import LLM, SamplingParams
from paxserve.models.kv_shape import kv_shape
from paxserve.sharding import MeshShape

PAGE, CAPACITY, LONGEST = 4, 16, 64  # tokens of a page; pages of a data group's pool; tokens of a sequence
TIGHT = {"page_size": PAGE, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": LONGEST}


def generate(directory: str, mesh: MeshShape) -> tuple[list[list[int]], list[float], LLM]:
    """Tokens of every sample, logprobs of one of them, and what made them."""
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(0, 60, n).tolist()} for n in (3, 17, 40, 9, 25, 1, 30, 12)]
    params = [SamplingParams(temperature=0, max_tokens=12, n=1 + (i == 1)) for i in range(len(prompts))]
    params[3] = SamplingParams(temperature=0.8, seed=5, max_tokens=12, logprobs=2, prompt_logprobs=1)
    num_pages = -(-CAPACITY // mesh.kv_page) + 1
    llm = LLM(directory, mesh=str(mesh), num_pages=num_pages, **TIGHT, compilation_cache_dir=None)
    outputs = llm.generate(prompts, params)
    tokens = [sample.token_ids for output in outputs for sample in output.outputs]
    (drawn,) = outputs[3].outputs
    logprobs = [entry[token].logprob for token, entry in zip(drawn.token_ids, drawn.logprobs or (), strict=True)]
    return tokens, logprobs, llm


def check(directory: str, mesh: MeshShape, expected: list[list[int]], expected_logprobs: list[float]) -> None:
    tokens, logprobs, llm = generate(directory, mesh)
    assert tokens == expected, mesh
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4)
    stats, state, config = llm.engine.stats, llm.engine.runner.state, llm.engine.source.config
    assert stats.compiles == 0
    if mesh.data == 1:
        assert stats.preemptions > 0, mesh
    # A data group's pages, in bytes, and what each of its devices has of them.
    page = kv_shape(config).page_bytes(PAGE, "float32")
    group = page * llm.engine.limits.num_pages * mesh.kv_page
    assert state.kv_pages.nbytes == group * mesh.data
    assert {shard.data.nbytes for shard in state.kv_pages.addressable_shards} == {group // mesh.tensor}
    assert len(state.kv_pages.addressable_shards) == mesh.chips
    assert llm.engine.groups.used_pages == 0


def main(directory: str) -> None:
    assert len(jax.devices()) == 8
    *expected, llm = generate(directory, MeshShape())
    kv_heads = kv_shape(llm.engine.source.config).heads
    sizes = [(data, kv_head, 8 // data // kv_head) for data, kv_head in itertools.product((1, 2, 4, 8), repeat=2)]
    meshes = [MeshShape(*each) for each in sizes if each[2] and kv_heads % each[1] == 0]
    for mesh in meshes:
        check(directory, mesh, *expected)
        print(mesh)


if __name__ == "__main__":
    main(sys.argv[1])
