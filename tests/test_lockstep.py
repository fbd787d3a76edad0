"""Several real processes on this machine: the same tokens as one, and none of them hangs when another one dies."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from engine_models import write_random
from recorded_run import ABORTED, record_run

from paxserve.cli import main
from paxserve.input_log import read_log
from paxserve.lockstep import check_header

LAUNCH = Path(__file__).parent.parent / "scripts/launch_local"
PATIENT = 300


class Launched:
    """`scripts/launch_local`, with what it printed and the process ids of its processes."""

    def __init__(self, processes, devices, *command):
        argv = [sys.executable, LAUNCH, processes, devices, *command]
        self.process = subprocess.Popen(
            [str(part) for part in argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        lines = [self.process.stderr.readline() for _ in range(processes)]
        self.pids = [int(re.fullmatch(r"\[\d+\] is process (\d+)\n", line)[1]) for line in lines]

    def wait(self):
        """(exit code, standard output, standard error)"""
        out, err = self.process.communicate(timeout=PATIENT)
        return self.process.returncode, out, err


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_random(directory)
    return directory


@pytest.fixture(scope="module")
def recorded(model, small_engine, tmp_path_factory):
    """(log file, outputs by request) of one process on one device."""
    file = tmp_path_factory.mktemp("log") / "run.jsonl"
    return file, record_run(model, file, small_engine)


@pytest.fixture
def cache(small_engine):
    return ["--compilation-cache-dir", small_engine["compilation_cache_dir"]]


def tokens(outputs):
    return {each["request_id"]: [sample["token_ids"] for sample in each["outputs"]] for each in outputs}


def test_four_processes_do_what_one_did(recorded, cache, tmp_path, capsys):
    """On a mesh of their four devices; one process on one device then repeats what they recorded."""
    file, outputs = recorded
    again = tmp_path / "again.jsonl"
    mesh = ["--mesh", "data=2,kv_page=2"]
    code, out, err = Launched(4, 1, "replay", file, "--json", "--record", again, *mesh, *cache).wait()
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])  # gloo may have said something before
    assert result["differences"] == []
    found = tokens(result["outputs"])
    assert found.keys() == outputs.keys()
    for name in outputs.keys() - {ABORTED}:
        assert found[name] == [sample.token_ids for sample in outputs[name].outputs]
    assert main(["replay", str(again), "--mesh", "1", *cache]) == 0
    assert capsys.readouterr().out.endswith(": as recorded\n")


@pytest.mark.parametrize(("processes", "victim"), [(4, 2), (2, 0)])
def test_a_process_that_is_killed_ends_the_others(processes, victim, model, cache, tmp_path):
    """In the middle of a benchmark; the input log then reaches as far as the run."""
    log = tmp_path / "run.jsonl"
    engine = {"max-num-seqs": 2, "max-num-batched-tokens": 8, "page-size": 8, "peer-timeout": 120}
    flags = [str(part) for name, value in engine.items() for part in (f"--{name}", value)]
    shape = ["--num-prompts", 10**6, "--input-len", "4:4", "--output-len", "100:100", "--concurrency", 2]
    run = Launched(processes, 1, "bench", "throughput", "--model", model, *shape, *flags, "--record", log, *cache)
    deadline = time.monotonic() + PATIENT
    while not log.exists() or log.read_text().count('"now"') < 50:
        assert run.process.poll() is None, run.wait()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(run.pids[victim], signal.SIGKILL)
    code, out, err = run.wait()
    assert code in (1, 128 + signal.SIGKILL)
    message = rf"paxserve: error: process {victim} \(.*\) is gone: its connection broke"
    assert len(re.findall(message, err)) == processes - 1, err
    assert "tok/s" not in out
    assert len(read_log(log).entries) >= 50


SCRIPT = """
import sys
from paxserve import LLM, SamplingParams

model, cache, *place = sys.argv[1:]
names = ("coordinator_address", "num_processes", "process_id")
place = dict(zip(names, (place[0], int(place[1]), int(place[2]))))
llm = LLM(model, max_num_seqs=2, max_num_batched_tokens=8, page_size=8, compilation_cache_dir=cache, **place)
outputs = llm.generate([[5, 6, 7], [9]], SamplingParams(max_tokens=5))
print("tokens", *[token for output in outputs for token in output.outputs[0].token_ids])
"""


def test_a_script_goes_on_in_the_first_process_only(model, small_engine, tmp_path):
    """It never closes its engine: that happens at exit, in all processes. Two with two devices each do what one does."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    argv = [sys.executable, script, model, small_engine["compilation_cache_dir"]]
    alone = subprocess.run([*argv, address, "1", "0"], capture_output=True, text=True, timeout=PATIENT, check=True)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    both = [
        subprocess.Popen([*argv, address, "2", str(number)], env=environment, stdout=subprocess.PIPE, text=True)
        for number in (1, 0)
    ]
    (follower, _), (leader, _) = [process.communicate(timeout=PATIENT) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert "tokens" not in follower
    assert leader.splitlines()[-1] == alone.stdout.splitlines()[-1]
    assert len(alone.stdout.split()) == 11


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"config": {"page_size": 8}}, "page_size is 16 in this process and 8 in process 0"),
        ({"limits": {"num_pages": 3}}, "num_pages is 5 in this process and 3 in process 0"),
        ({"fingerprint": "0123"}, "fingerprint is 'abcd' in this process and '0123' in process 0"),
        ({"model": "/elsewhere/model"}, None),
    ],
)
def test_processes_that_were_started_otherwise_are_refused(theirs, message):
    ours = {"model": "m", "fingerprint": "abcd", "config": {"page_size": 16}, "limits": {"num_pages": 5}}
    expected = pytest.raises(ValueError, match=re.escape(message)) if message else nullcontext()
    with expected:
        check_header({**ours, **theirs}, ours)


def test_a_process_that_is_missing_is_named(model):
    alone = ["--num-processes", "2", "--start-timeout", "2", "--coordinator-address", "127.0.0.1:0"]
    command = [sys.executable, "-m", "paxserve", "generate", "--model", model, *alone, "--process-id", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT)
    assert done.returncode == 2
    assert "error: process 1 of 2 did not start within 2 s (start_timeout); there are process 0 (" in done.stderr
