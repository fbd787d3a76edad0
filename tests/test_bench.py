"""`paxserve bench`: the workload's exact totals, the bound's arithmetic, and a small run through the command line."""

import argparse
import ast
import json
import random
import sys
from pathlib import Path

import pytest
from tiny_checkpoints import hf_config

from paxserve.bench.baseline import run_transformers
from paxserve.bench.bound import Machine, StepCost, layer_weights, step_cost
from paxserve.bench.workload import W64, BenchRequest, Workload, make_requests
from paxserve.cli import bench
from paxserve.model_source import resolve_model
from paxserve.models.config import ModelConfig, RopeConfig
from paxserve.request import Request
from paxserve.sampling_params import SamplingParams
from paxserve.scheduler import PlannedRow


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "throughput", *argv])


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    return tmp_path


def test_w64_has_its_exact_totals_and_real_text(smollm2_gguf: Path) -> None:
    source = resolve_model(smollm2_gguf)
    requests = make_requests(W64, source.tokenizer, source.config.vocab_size)
    prompts = [request.prompt_token_ids for request in requests]
    assert len(requests) == 64
    assert sum(map(len, prompts)) == 17_408
    assert sum(request.max_tokens for request in requests) == 6_144
    assert all(32 <= len(prompt) <= 512 for prompt in prompts)
    assert all(64 <= request.max_tokens <= 128 for request in requests)
    assert len(set(map(len, prompts))) > 32
    assert requests == make_requests(W64, source.tokenizer, source.config.vocab_size)
    text = " ".join(source.tokenizer.decode(prompt) for prompt in prompts)
    assert text.count(" the ") > 100


@pytest.mark.parametrize("seed", range(5))
def test_lengths_meet_the_middle_of_their_range(seed: int) -> None:
    draw = random.Random(seed)
    low = draw.randint(1, 20)
    workload = Workload("", draw.randint(1, 40), (low, low + draw.randint(0, 9)), (1, 4), 2, seed)
    requests = make_requests(workload, None, 100)
    lengths = [len(request.prompt_token_ids) for request in requests]
    assert sum(lengths) == workload.num_prompts * sum(workload.input_len) // 2
    assert workload.input_len[0] <= min(lengths) <= max(lengths) <= workload.input_len[1]
    assert all(0 <= token < 100 for request in requests for token in request.prompt_token_ids)


@pytest.mark.parametrize(
    "shape", [{"num_prompts": 0}, {"input_len": (5, 4)}, {"output_len": (0, 4)}, {"concurrency": 0}]
)
def test_impossible_workloads_are_refused(shape: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(shape))):
        Workload(
            **({"name": "", "num_prompts": 1, "input_len": (1, 1), "output_len": (1, 1), "concurrency": 1} | shape)
        )


def test_cost_of_a_step_by_hand() -> None:
    config = ModelConfig(
        "llama", 10, 4, 6, 2, 2, 1, 3, 64, 1e-5, RopeConfig(), windows=(None, 4)
    )  # hidden 4, MLP 6, 2 layers, 2 query heads on 1 KV head of 3, vocabulary 10
    assert layer_weights(config) == 2 * (4 * 6) + 2 * (4 * 3) + 3 * (
        4 * 6
    )  # q and out, k and v, gate, up and down: 144
    request = Request("", [0], SamplingParams())
    decode = PlannedRow(request, start=9, count=1, samples=True)
    chunk = PlannedRow(request, start=2, count=3, samples=False)

    # Keys attended: the full layer 10 and 3 + 4 + 5, the windowed one 4 and 3 + 4 + 4.
    cost = step_cost(config, 2, [decode, chunk])
    assert cost.flops == 2 * (2 * 144 * 4) + 2 * 40 + (10 + 12 + 4 + 11) * 2 * (3 + 3) * 2
    # KV touched: the full layer 10 and 5, the windowed one 4 and 5, K and V of 3 each.
    assert cost.bytes == 2 * (2 * 144 + 40 + (10 + 5 + 4 + 5) * 6)
    # No token is drawn: the head is neither read nor multiplied.
    assert step_cost(config, 4, [chunk]) == StepCost(4 * (288 + 10 * 6), 2 * 288 * 3 + (12 + 11) * 24)


def test_bound_is_the_longer_of_reading_and_computing() -> None:
    machine = Machine(bytes_per_second=10.0, flops_per_second=100.0, stream_bytes=0)
    assert machine.bound(StepCost(bytes=50, flops=100)) == 5.0
    assert machine.bound(StepCost(bytes=50, flops=1000)) == 10.0


def test_throughput_of_a_random_model(tiny_model: Path, capsys: pytest.CaptureFixture) -> None:
    sizes = "--max-num-seqs 2 --max-num-batched-tokens 16 --max-model-len 64 --num-pages 16 --page-size 8"
    shape = "--num-prompts 4 --input-len 4:20 --output-len 2:6 --concurrency 3"
    model = f"--model {tiny_model} --load-format dummy --compilation-cache-dir none"
    args = parse(*f"{model} {sizes} {shape} --repeat 2 --json".split())
    assert args.run(args) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["prompt_tokens"], report["output_tokens"]) == (48, 16)
    assert report["random_prompts"]
    assert report["compiles_after_warmup"] == 0
    assert report["num_pages"] == 16
    assert report["median_seconds"] == min(report["seconds"])
    assert report["total_tok_s"] == pytest.approx(64 / report["median_seconds"])
    assert {bucket["bucket"] for bucket in report["buckets"]} <= {"decode 2", "mixed 16"}
    # Every prompt token, and every output token but the last of each request, is an input of one step.
    assert sum(bucket["steps"] * bucket["tokens_per_step"] for bucket in report["buckets"]) == pytest.approx(60)


def test_a_named_workload_cannot_be_reshaped() -> None:
    args = parse("--workload", "W64", "--input-len", "4:8")
    with pytest.raises(ValueError, match="leave out --input-len"):
        args.run(args)


def test_transformers_runs_in_an_interpreter_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    (tiny_model / "model.safetensors").touch()
    source = resolve_model(tiny_model)
    requests = [BenchRequest([1, 2, 3], 4)]
    python = tmp_path / "python"
    options = {"python": str(python), "dtype": "float32", "batch_size": 2, "repeat": 1}

    python.write_text(f"#!/bin/sh\ncat > {tmp_path}/job\necho '{{\"seconds\": [1.5]}}'\n")
    python.chmod(0o755)
    assert run_transformers(source, requests, requests, **options) == {"seconds": [1.5]}
    job = json.loads((tmp_path / "job").read_text())
    assert job["requests"] == [[[1, 2, 3], 4]]
    assert (job["directory"], job["gguf_file"], job["dtype"]) == (str(tiny_model), None, "float32")

    python.write_text("#!/bin/sh\necho No module named torch >&2\nexit 1\n")
    with pytest.raises(ValueError, match=r"No module named torch.*--transformers-python"):
        run_transformers(source, requests, requests, **options)


def test_transformers_needs_weights_it_can_read(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        run_transformers(
            resolve_model(tiny_model), [], [], python=sys.executable, dtype="float32", batch_size=1, repeat=1
        )


def test_the_baseline_script_stands_alone() -> None:
    path = Path(bench.__file__).parents[1] / "bench" / "transformers_baseline.py"
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names} | {getattr(node, "module", "") for node in imports}
    assert not any((name or "").startswith("paxserve") for name in names)
