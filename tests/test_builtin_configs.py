"""The built-in configurations: each describes a model with the number of parameters that was published with it."""

import math

import jax
import pytest
from flax import nnx

from paxserve.checkpoints.reader import CheckpointError
from paxserve.model_source import resolve_kv_shape, resolve_model
from paxserve.models.builtin import builtin_config, builtin_file, builtin_names
from paxserve.models.config_hf import config_from_hf
from paxserve.models.registry import model_class

PARAMETERS = {
    "deepseek-67b": 67_425_001_472,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
"""Of the checkpoints published on Hugging Face; DeepSeek-V3's without its layer for multi-token prediction."""


def count(name):
    config = config_from_hf(builtin_config(name))
    params = nnx.state(model_class(config)(config, dtype="bfloat16", scan_layers=True))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name):
    assert count(name) == PARAMETERS[name]


def test_a_name_stands_for_a_configuration_without_weights():
    source = resolve_model("llama-3.1-8b")
    assert (source.name, source.format, source.config.num_kv_heads, source.tokenizer) == (
        "llama-3.1-8b",
        "config",
        8,
        None,
    )
    with pytest.raises(CheckpointError, match=r"llama-3\.1-8b\.json is a configuration without weights"):
        source.load(None, None)


def test_every_name_has_a_footprint():
    for name in builtin_names():
        assert resolve_kv_shape(name)[0] == name


@pytest.mark.parametrize("name", [name for name in builtin_names() if name.startswith("opt-")])
def test_what_cannot_be_served_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match="model_type 'opt' is not supported"):
        resolve_model(name)


def test_a_config_file_by_its_path(tmp_path):
    directory = tmp_path / "my-model-v0.3"
    directory.mkdir()
    for file in (directory / "config.json", tmp_path / "other-v1.2.json"):
        file.write_text(builtin_file("opt-13b").read_text())
    expected = resolve_kv_shape("opt-13b")[1]
    assert resolve_kv_shape(directory) == resolve_kv_shape(directory / "config.json") == ("my-model-v0.3", expected)
    assert resolve_kv_shape(tmp_path / "other-v1.2.json") == ("other-v1.2", expected)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no built-in configuration 'llama-9'; there are deepseek-67b, "):
        builtin_config("llama-9")
