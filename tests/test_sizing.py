"""The KV pool's size from a device's memory; the memory is made up, no program is compiled."""

import pytest
from test_model_config import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from tiny_checkpoints import hf_config

from paxserve.config import EngineConfig
from paxserve.models.config_hf import config_from_hf
from paxserve.sharding import MeshShape
from paxserve.sizing import bytes_per_page, size_limits

MODEL = config_from_hf(hf_config())
PAGE = bytes_per_page(MODEL, 32, "float32", MeshShape())


def num_pages(memory_pages: int | None, step_pages: int, **options) -> int:
    """Pages of the pool on a GPU whose memory and whose largest step are so many pages large; the step has 2 of them.

    None is a CPU.
    """
    config = EngineConfig(model="any", **options)
    memory = None if memory_pages is None else memory_pages * PAGE
    return size_limits(config, MODEL, "float32", MeshShape(), memory, lambda limits: step_pages * PAGE).num_pages


def test_pool_takes_what_the_largest_step_leaves():
    assert num_pages(1000, 102) == 1000 * 9 // 10 - 100
    assert num_pages(1000, 102, memory_fraction=0.5) == 500 - 100


def test_pool_on_cpu_is_no_larger_than_all_sequences_can_use():
    assert num_pages(None, 102, max_num_seqs=4, max_model_len=64) == 4 * 2 + 1
    assert num_pages(10**6, 102, max_num_seqs=4, max_model_len=64) == 10**6 * 9 // 10 - 100


@pytest.mark.parametrize("memory", [None, 1000])
def test_a_size_that_is_given_is_the_pools(memory):
    assert num_pages(memory, 102, max_num_seqs=4, max_model_len=64, kv_cache_bytes=50 * PAGE + 1) == 50
    assert num_pages(memory, 102, max_num_seqs=4, max_model_len=64, num_pages=60) == 60


def test_no_memory_left_is_an_error():
    with pytest.raises(ValueError, match="needs at least 2"):
        num_pages(100, 102)


@pytest.mark.parametrize("size", [{"num_pages": 9}, {"kv_cache_bytes": 10**6}])
def test_memory_fraction_is_refused_where_the_pool_has_a_size(size):
    with pytest.raises(ValueError, match="memory_fraction has no effect"):
        EngineConfig(model="any", memory_fraction=0.5, **size)


def test_memory_fraction_is_refused_on_cpu():
    config = EngineConfig(model="any", memory_fraction=0.5)
    with pytest.raises(ValueError, match=r"memory_fraction=0\.5: on CPU"):
        size_limits(config, MODEL, "float32", MeshShape(), None, lambda limits: 0)


@pytest.mark.parametrize(("config", "token_bytes"), [(DEEPSEEK_V2_LITE, 31_104), (DEEPSEEK_V3, 70_272)])
def test_latent_attention_caches_one_row_a_token(config, token_bytes):
    """576 bfloat16 values per token and layer, of DeepSeek-V2-Lite's 27 layers and V3's 61."""
    assert bytes_per_page(config_from_hf(config), 16, "bfloat16", MeshShape()) == 16 * token_bytes
