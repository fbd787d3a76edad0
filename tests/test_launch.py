"""The scripts and manifests that start paxserve on several hosts, with the clusters' commands replaced by our own."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paxserve.cli import build_parser

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "scripts/launch"


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Puts a command of this name and text on the path."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(name, text):
        file = tmp_path / name
        file.write_text(f"#!/usr/bin/env bash\n{text}\n")
        file.chmod(0o755)

    return write


def test_cloud_tpu_runs_the_command_on_every_worker(command):
    command("gcloud", f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"")
    argv = ["generate", 'It\'s $HOME "here"', "--max-tokens", "3"]
    done = subprocess.run([LAUNCH / "cloud-tpu", "slice", "zone-a", *argv], capture_output=True, text=True, check=True)
    *start, command_line = json.loads(done.stdout)
    assert start == ["compute", "tpus", "tpu-vm", "ssh", "slice", "--zone", "zone-a", "--worker=all", "--command"]
    assert shlex.split(command_line) == ["cd", "paxserve", "&&", ".venv/bin/paxserve", *argv]


def test_cloud_tpu_installs_what_is_committed(command, tmp_path):
    command("gcloud", f"[[ $4 != scp ]] || tar tzf $5 > {tmp_path}/files; echo $4 >> {tmp_path}/calls")
    subprocess.run([LAUNCH / "cloud-tpu", "slice", "zone-a", "install"], check=True)
    assert (tmp_path / "calls").read_text().split() == ["scp", "ssh"]
    assert {"paxserve/pyproject.toml", "paxserve/paxserve/models"} <= set((tmp_path / "files").read_text().split())


def test_cloud_tpu_says_how_to_use_it():
    done = subprocess.run([LAUNCH / "cloud-tpu"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("One model on all workers of a Cloud TPU VM slice.\n")


def test_gke_starts_one_process_per_host_of_the_slice():
    jobset = yaml.safe_load((LAUNCH / "gke.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    job = job["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    x, y, z = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert job["completions"] == job["parallelism"] == x * y * z / container["resources"]["limits"]["google.com/tpu"]
    args = build_parser().parse_args(container["args"])
    assert (args.prompts, args.model, args.start_timeout) == (["The sky is"], "/model", 600)


def test_slurm_starts_processes_that_find_each_other(command, tmp_path):
    """`srun` sets the variables of two tasks on one node; both are real processes, and JAX sees the devices of both."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    paxserve = tmp_path / ".venv/bin/paxserve"
    paxserve.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -m paxserve "$@"\n')
    paxserve.chmod(0o755)
    job = os.getpid() % 2**12
    command(
        "srun",
        f"export SLURM_JOB_ID={job} SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2\n"
        'shift\nfor task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & pids+=($!); done\n'
        'for pid in "${pids[@]}"; do wait $pid || exit; done',
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    argv = ["bash", LAUNCH / "slurm.sbatch", "info", "--model", "llama-3.1-8b", "--max-model-len", "512", "--json"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["jax"]["devices"]) == 2
