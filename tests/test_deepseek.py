"""A DeepSeek checkpoint, latent attention and experts, from the command line: all ways give the dense model's tokens."""

import json

import pytest
from engine_models import END, VOCABULARY, write_random, write_tokenizer

from paxserve import SamplingParams
from paxserve.cli import main

PROMPTS = ["hello", "The latent of every token is one row."]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(directory, the same model in numpy)."""
    directory = tmp_path_factory.mktemp("deepseek")
    fields = {"vocab_size": len(VOCABULARY), "bos_token_id": 0, "eos_token_id": END}
    dense = write_random(directory, "deepseek_v3_experts", **fields)
    write_tokenizer(directory)
    return directory, dense


@pytest.fixture(scope="module")
def orbax(model, tmp_path_factory):
    """The model as an Orbax checkpoint of our own."""
    directory = tmp_path_factory.mktemp("orbax") / "model"
    assert main(["convert", str(model[0]), str(directory)]) == 0
    return directory


@pytest.mark.parametrize(
    ("source", "attention", "layers", "query_rows"),
    [
        ("safetensors", "reference", "--no-scan-layers", None),
        ("orbax", "xla", "--scan-layers", None),
        ("safetensors", "xla", "--scan-layers", 20),
    ],
)
def test_generate(model, orbax, source, attention, layers, query_rows, xla_cache, capsys, monkeypatch):
    directory, dense = model
    if query_rows is not None:  # the prompt's tokens attend in several parts
        monkeypatch.setattr("paxserve.models.deepseek.QUERY_ROWS", query_rows)
    flags = {
        "model": orbax if source == "orbax" else directory,
        "attention": attention,
        "temperature": 0,
        "max-tokens": MAX_TOKENS,
        "max-num-seqs": 2,
        "max-num-batched-tokens": 16,  # the longer prompt comes in chunks
        "page-size": 8,
        "compilation-cache-dir": xla_cache,
    }
    arguments = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    assert main(["generate", *PROMPTS, "--json", layers, *arguments]) == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = [VOCABULARY.index(symbol) for symbol in prompt.replace(" ", "Ġ")]
        assert output["prompt_token_ids"] == tokens
        assert output["outputs"][0]["token_ids"] == dense.generate(tokens, params)
