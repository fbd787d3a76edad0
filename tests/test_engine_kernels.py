"""Whole engines on the TPU's and the GPU's attention, simulated: they generate what they do on `xla`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_models import write_checkpoint
from test_mosaic_tpu import SMALL
from test_mosaic_tpu_mla import SMALL as SMALL_MLA
from test_paged_attention import needs_interpreter

from paxserve import LLM, SamplingParams
from paxserve.pallas_kernels import mosaic_tpu, mosaic_tpu_mla

LLAMA: dict[str, Any] = {"name": "qwen2_some_windows"}
# Sizes that the kernel for Hopper computes.
DEEPSEEK: dict[str, Any] = {"name": "deepseek_v3_experts", "kv_lora_rank": 128, "qk_rope_head_dim": 64}
ENGINE = {"page_size": 16, "num_pages": 9, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64}


def generate(directory: Path, attention: str, dtype: str) -> list[list[int]]:
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(0, 60, n).tolist()} for n in (3, 17)]
    llm = LLM(str(directory), attention=attention, dtype=dtype, debug=True, compilation_cache_dir=None, **ENGINE)
    assert llm.engine.runner.attention == attention
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3))
    return [output.outputs[0].token_ids for output in outputs]


# In float16, since in bfloat16 a model as small as these has tokens that tie.
@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
@pytest.mark.parametrize(("attention", "dtype"), [("mosaic_tpu", "float32"), ("mosaic_gpu", "float16")])
def test_tokens_are_those_of_xla(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], attention: str, dtype: str
) -> None:
    for module in (mosaic_tpu, mosaic_tpu_mla):  # to be compiled in seconds
        monkeypatch.setattr(module, "block_sizes", lambda kernel, **_: (SMALL | SMALL_MLA)[kernel])
    if attention == "mosaic_gpu":
        needs_interpreter()
    write_checkpoint(tmp_path, **model)
    assert generate(tmp_path, attention, dtype) == generate(tmp_path, "xla", dtype)
