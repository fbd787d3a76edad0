"""`paxserve plan`: it says of this machine what a running engine says, and counts what compiled programs communicate."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from engine_models import write_random

from paxserve.chips import chips, describe
from paxserve.cli import main
from paxserve.hlo import Collective, collectives

HLO = """\
HloModule jit_step

%body.1 (p: (s32[], bf16[8,64])) -> (s32[], bf16[8,64]) {
  %psum.2 = bf16[8,64]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add.1
  ROOT %t = (s32[], bf16[8,64]) tuple(%i, %psum.2)
}

%condition.1 (p: (s32[], bf16[8,64])) -> pred[] {
  %constant.5 = s32[]{:T(128)} constant(32), metadata={op_name="x"}
  ROOT %lt = pred[] compare(%i, %constant.5), direction=LT
}

%inner.1 (p: f32[4]) -> f32[16] {
  ROOT %ag = f32[16]{0} all-gather(%p), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
}

ENTRY %main.1 (a: bf16[8,64]) -> bf16[8,64] {
  %while.1 = (s32[], bf16[8,64]) while(%t0), condition=%condition.1, body=%body.1
  %while.2 = (s32[], bf16[8,64]) while(%t1), condition=%c.2, body=%body.1, backend_config={"known_trip_count":{"n":"3"}}
  %fusion.1 = f32[16]{0} fusion(%b), kind=kLoop, calls=%inner.1
  %a2a = (f32[2,8]{1,0}, s8[4]{0}) all-to-all(%y, %z), replica_groups={{0,1},{2,3}}
  %rs-start = (f32[16]{0}, f32[4]{0}) all-gather-start(%w), replica_groups={{0,1,2,3}}
}
"""


def test_collectives_of_a_program() -> None:
    assert collectives(HLO) == Counter(
        {
            Collective("all-reduce", 8 * 64 * 2, 4): 35,
            Collective("all-gather", 64, 4): 2,
            Collective("all-to-all", 64 + 4, 2): 1,
        }
    )


@pytest.mark.parametrize(
    ("collective", "sent"),
    [
        (Collective("all-reduce", 400, 4), 600),
        (Collective("all-gather", 400, 4), 300),
        (Collective("reduce-scatter", 100, 4), 300),
        (Collective("all-to-all", 400, 4), 300),
        (Collective("collective-permute", 400, 2), 400),
    ],
)
def test_bytes_sent(collective: Collective, sent: float) -> None:
    assert collective.sent == sent


def test_plan_for_this_machine_is_what_its_engine_is(random_model, tight_llm, capsys) -> None:
    """The pool that the plan sizes, the weights, and the mesh are those of the running engine and of `paxserve info`."""
    sizes = ["--page-size", "8", "--max-num-seqs", "4", "--max-num-batched-tokens", "16"]
    plan = [*sizes, "--context", "64", "--topology", "cpu:1", "--json"]
    assert main(["plan", str(random_model[0]), *plan]) == 0
    planned = json.loads(capsys.readouterr().out)
    info = [*sizes, "--max-model-len", "64", "--dtype", "float32", "--json"]
    assert main(["info", "--model", str(random_model[0]), *info]) == 0
    facts = json.loads(capsys.readouterr().out)
    runner = tight_llm.engine.runner
    assert planned["memory"]["weights"] == facts["model"]["weight_bytes"] == runner.weight_bytes
    assert planned["memory"]["kv_pages"] == facts["kv_pool"]["bytes"]
    assert planned["limits"]["num_pages"] == facts["kv_pool"]["num_pages"]
    assert planned["kv_tokens"] == facts["kv_pool"]["tokens"]
    assert planned["attention"] == facts["engine"]["attention"] == runner.attention
    assert set(planned["compile_seconds"]) == set(facts["engine"]["buckets"])
    page = runner.kv_bytes // tight_llm.engine.limits.num_pages
    assert planned["memory"]["kv_pages"] == page * planned["limits"]["num_pages"]
    assert planned["requests"] == planned["running"] == 4
    assert planned["verdict"] == "fits, with room for 4 requests of 64 tokens, of which 4 run at a time"
    assert planned["decode"] is None


ON_TWO_DEVICES = """
import contextlib, io, json, sys
import jax
from paxserve import LLM
from paxserve.cli import main

def facts(*command):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*command, "--json"]) == 0
    return json.loads(out.getvalue())

def held(arrays):
    return sum(leaf.addressable_shards[1].data.nbytes for leaf in jax.tree.leaves(arrays))

model, *sizes = sys.argv[1:]
options = {name.removeprefix("--").replace("-", "_"): int(value) for name, value in zip(sizes[::2], sizes[1::2])}
runner = LLM(model, max_model_len=64, compilation_cache_dir=None, **options).engine.runner
print(json.dumps({
    "plan": facts("plan", model, "--topology", "cpu:2", "--context", "64", *sizes),
    "info": facts("info", "--model", model, "--max-model-len", "64", *sizes),
    "weights": held(runner._params),
    "kv_pages": held(runner.state.kv_pages),
    "num_pages": runner.limits.num_pages,
    "kv_tokens": runner.limits.pool_tokens,
    "buckets": [str(bucket) for bucket in runner.buckets],
}))
"""


def test_plan_for_two_devices_is_what_each_of_them_holds(tmp_path) -> None:
    write_random(tmp_path)
    sizes = ["--page-size", "8", "--max-num-seqs", "2", "--max-num-batched-tokens", "8"]
    result = subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES, str(tmp_path), *sizes],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": ".", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    )
    assert result.returncode == 0, result.stderr
    engine = json.loads(result.stdout.splitlines()[-1])
    plan, info = engine["plan"], engine["info"]
    assert plan["memory"]["weights"] == engine["weights"] < info["model"]["weight_bytes"] < 2 * engine["weights"]
    assert plan["memory"]["kv_pages"] == engine["kv_pages"] == info["kv_pool"]["bytes"]
    assert plan["limits"]["num_pages"] == engine["num_pages"] == info["kv_pool"]["num_pages"]
    assert plan["kv_tokens"] == engine["kv_tokens"] == info["kv_pool"]["tokens"]
    assert list(plan["compile_seconds"]) == engine["buckets"] == info["engine"]["buckets"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v9:2x2"], "give a chip and its arrangement, as in v5p:2x2x1, h100:8 or cpu:1"),
        (["--topology", "v5e"], "give a chip and its arrangement"),
        (["--topology", "cpu:1", "--mesh", "1", "--search"], "--mesh and --search exclude each other"),
        (["--topology", "cpu:1", "--context", "0"], "--context 0: must be at least 1"),
        (["--topology", "cpu:1", "--weight-dtype", "fp8"], "fp8"),
    ],
)
def test_user_errors(arguments: list[str], message: str, capsys) -> None:
    assert main(["plan", "llama-3.1-8b", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_chips_have_figures_and_a_source() -> None:
    for chip in chips().values():
        assert chip.memory_bytes > 2**33
        assert min(chip.memory_gb_s, chip.bf16_tflop_s, chip.link_gb_s) > 100
        assert chip.source
    assert len(describe("cpu:1").devices) == 1
