"""Logits of tiny models against those of transformers (tests/golden/make_tiny_logits.py), prefilled and decoded."""

import itertools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden.tiny_models import LOGIT_POSITIONS, MODELS, NUM_TOKENS, prompt, weight

from paxserve.models.batch import AttentionBatch
from paxserve.models.config_hf import config_from_hf
from paxserve.models.registry import model_class
from paxserve.models.weights import tensor_sources
from paxserve.pallas_kernels import storage_dtype

GOLDEN = np.load(Path(__file__).parent / "golden" / "tiny_logits.npz")
TOLERANCE = 2e-5  # relative to the largest logit
PAGE_SIZE, NUM_PAGES = 8, 24
# Two sequences with room for NUM_TOKENS tokens each, their pages in no order. Entries past a sequence's end are rubbish.
BLOCK_TABLES = np.array([[7, 3, 9, 1, 12, 23], [2, 11, 4, 8, 6, 23]], np.int32)
DECODE_FROM, CHUNK = 26, 13


class Runner:
    """One model with its pages, run step by step on ragged batches."""

    def __init__(self, config, graph, params, *, attention, dtype=jnp.float32):
        self.config, self.graph, self.params, self.attention = config, graph, params, attention
        shape = model_class(self.config).pages_shape(self.config, NUM_PAGES, PAGE_SIZE, jax.default_backend())
        pages = jnp.zeros(shape, storage_dtype(dtype))
        nan = jnp.nan if pages.dtype == dtype else 0x7FC0  # bfloat16 pages are stored by bit pattern on CPU
        self.pages = jnp.full_like(pages, nan)  # whatever is read before it is written shows
        self.step = jax.jit(self._step)

    def _step(self, params, tokens, pages, batch):
        model = nnx.merge(self.graph, params)
        hidden, pages = model(tokens, pages, batch)
        return model.logits(hidden), pages

    def run(self, spans, *, padded_tokens, max_query_len=None):
        """Logits per sequence for spans [(token ids, first position)], one per row of BLOCK_TABLES; empty: not in."""
        tokens, positions, pages, offsets = (np.zeros(padded_tokens, np.int32) for _ in range(4))
        starts, contexts, end = [0], [], 0
        for row, (ids, first) in enumerate(spans):
            rows, place = slice(end, end + len(ids)), np.arange(first, first + len(ids))
            tokens[rows], positions[rows] = ids, place
            pages[rows], offsets[rows] = BLOCK_TABLES[row][place // PAGE_SIZE], place % PAGE_SIZE
            end += len(ids)
            starts.append(end)
            contexts.append(first + len(ids) if len(ids) else 0)
        batch = AttentionBatch(
            positions=positions,
            token_pages=pages,
            token_offsets=offsets,
            block_tables=BLOCK_TABLES[: len(spans)],
            context_lens=np.array(contexts, np.int32),
            query_starts=np.array(starts, np.int32),
            num_pages=NUM_PAGES,
            max_query_len=max_query_len,
            attention=self.attention,
        )
        logits, self.pages = self.step(self.params, tokens, self.pages, batch)
        assert np.isfinite(logits).all()  # of padding too
        return [np.asarray(logits)[a:b] for a, b in itertools.pairwise(starts)]


def tiny_runner(name, *, scan_layers, attention, dtype=jnp.float32):
    """A Runner of one of MODELS."""
    config = config_from_hf(MODELS[name])
    return Runner(config, *build(config, scan_layers, dtype), attention=attention, dtype=dtype)


def build(config, scan_layers, dtype):
    """(graphdef, params) with the weights of `tiny_models`, placed as `tensor_sources` says."""
    graph, state = abstract(config, scan_layers, dtype)
    values = {path: np.full(param.shape, np.nan, np.float32) for path, param in state.items()}
    runs = config.alike_layers()
    for source in tensor_sources(config):
        path, index = tuple(source.path.split(".")), source.index
        if scan_layers and path[0] == "layers":
            (number,) = (i for i, run in enumerate(runs) if int(path[1]) in run)
            path, index = (path[0], str(number), *path[2:]), (int(path[1]) - runs[number].start, *index)
        values[path][index] = weight(source.name, source.shape).reshape(source.view)[source.part]
    return graph, nnx.from_flat_state(
        {
            tuple(int(part) if part.isdigit() else part for part in path): param.replace(
                jnp.asarray(values[path], param.dtype)
            )
            for path, param in state.items()
        }
    )


def abstract(config, scan_layers, dtype):
    """(graphdef, {path: parameter without values}), every part of a path a string."""
    graph, state = nnx.split(model_class(config)(config, dtype=dtype, scan_layers=scan_layers))
    return graph, {tuple(map(str, path)): param for path, param in nnx.to_flat_state(state)}


def relative_error(logits, name):
    golden = GOLDEN[name]
    return np.abs(logits[list(LOGIT_POSITIONS)] - golden).max() / np.abs(golden).max()


@pytest.mark.parametrize("name", MODELS)
def test_whole_prefill(name):
    runner = tiny_runner(name, scan_layers=False, attention="reference")
    (logits,) = runner.run([(prompt(name), 0)], padded_tokens=NUM_TOKENS + 2)
    assert relative_error(logits, name) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_chunked_prefill_and_decode(name):
    """Layers scanned; a second, unrelated sequence rides along, a few tokens behind."""
    runner = tiny_runner(name, scan_layers=True, attention="xla")
    tokens, other = prompt(name), prompt("other")
    logits = []
    for first in range(0, DECODE_FROM, CHUNK):
        spans = [(tokens[first : first + CHUNK], first), (other[first : first + CHUNK - 2], first)]
        spans = spans if first == 0 else [spans[0], (other[:0], 0)]
        logits.append(runner.run(spans, padded_tokens=2 * CHUNK + 3)[0])
    for first in range(DECODE_FROM, NUM_TOKENS):
        at = first - DECODE_FROM + CHUNK - 2
        spans = [(tokens[first : first + 1], first), (other[at : at + 1], at)]
        logits.append(runner.run(spans, padded_tokens=2, max_query_len=1)[0])
    logits = np.concatenate(logits)
    assert relative_error(logits, name) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen2_some_windows", "deepseek_v2_experts"])
def test_scanned_equals_unrolled(name):
    runners = [tiny_runner(name, scan_layers=scan, attention="xla") for scan in (False, True)]
    unrolled, scanned = (runner.run([(prompt(name), 0)], padded_tokens=NUM_TOKENS)[0] for runner in runners)
    np.testing.assert_allclose(scanned, unrolled, atol=1e-5)
    owned = [page for row in BLOCK_TABLES[:1, :5] for page in row]
    pages = [r.pages.reshape(r.config.num_layers, NUM_PAGES, *r.pages.shape[1:])[:, owned] for r in runners]
    np.testing.assert_allclose(pages[0], pages[1], atol=1e-5)


@pytest.mark.parametrize("name", ["llama_mha", "mixtral_window", "qwen3_moe_some_dense", "deepseek_v3"])
def test_bfloat16_is_near(name):
    runner = tiny_runner(name, scan_layers=False, attention="xla", dtype=jnp.bfloat16)
    (logits,) = runner.run([(prompt(name), 0)], padded_tokens=NUM_TOKENS)
    assert logits.dtype == np.float32
    assert relative_error(logits, name) < 0.05


@pytest.mark.parametrize("name", MODELS)
def test_sources_fill_every_parameter_once(name):
    config = config_from_hf(MODELS[name])
    _, state = abstract(config, scan_layers=False, dtype=jnp.float32)
    filled = {".".join(path): np.zeros(param.shape, int) for path, param in state.items()}
    used = {source.name: np.zeros(source.shape, int) for source in tensor_sources(config)}
    for source in tensor_sources(config):
        assert len(source.index) == filled[source.path].ndim
        taken = used[source.name].reshape(source.view)[source.part]
        region = filled[source.path][source.index]
        assert region.shape == taken.shape
        taken += 1
        region += 1
    assert all((count == 1).all() for count in [*filled.values(), *used.values()])


def test_unknown_architecture_is_refused():
    config = replace(config_from_hf(MODELS["llama_mha"]), architecture="mamba")
    with pytest.raises(NotImplementedError, match="mamba"):
        model_class(config)
