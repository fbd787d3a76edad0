"""The command line, run in this process on the model that recites its vocabulary."""

import argparse
import dataclasses
import io
import json
import signal
import subprocess
import sys

import pytest
from engine_models import write_reciting
from golden.tiny_models import MODELS

from paxserve import LLM, SamplingParams
from paxserve.cli import COMMANDS, generate, main
from paxserve.cli.options import (
    add_engine_options,
    add_sampling_options,
    engine_options,
    sampling_params,
)
from paxserve.config import EngineConfig
from paxserve.engine import Engine

TEMPERATURE = ("--temperature", "0.5")  # the model recites at any temperature


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_reciting(directory)
    return directory


@pytest.fixture(scope="module")
def engine_flags(model, tmp_path_factory):
    """A small engine; its programs are compiled once for this file."""
    cache = tmp_path_factory.mktemp("xla")
    flags = {"max-num-seqs": 2, "max-num-batched-tokens": 16, "page-size": 8, "compilation-cache-dir": cache}
    return ["--model", str(model), *(str(part) for name, value in flags.items() for part in (f"--{name}", value))]


@pytest.fixture
def run(engine_flags, capsys, monkeypatch):
    """Runs a command on the small engine: (exit code, standard output, standard error)."""

    def run(*argv, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main([*argv, *engine_flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_generate_prints_texts_and_figures(run):
    code, out, err = run("generate", "a", "w", "--max-tokens", "3")
    assert code == 0
    assert "[1] abcd\n" in out
    assert "[2] wxyz\n" in out
    figures = {
        row[0].strip(): row[1].strip() for line in out.splitlines() if len(row := line.strip("│").split("│")) == 2
    }
    assert figures["prompt tokens"] == "2"
    assert figures["output tokens"] == "6"
    assert figures["KV pages at the peak"] == "2 of 32"
    assert figures["compiles after warm-up"] == "0"
    assert "KV pool: 33 pages of 8 tokens (256 tokens in all), 132 KiB, 512 B per token\n" in err


def test_generate_json(run):
    code, out, _ = run("generate", "w", "a", "--max-tokens", "6", "--n", "2", "--logprobs", "1", "--json", *TEMPERATURE)
    assert code == 0
    result = json.loads(out)
    assert result.keys() == {"model", "outputs", "figures", "kv_pool"}
    assert [output["prompt"] for output in result["outputs"]] == ["w", "a"]
    first = result["outputs"][0]["outputs"]
    assert [(sample["index"], sample["text"], sample["finish_reason"]) for sample in first] == [
        (0, "xyzé", "length"),
        (1, "xyzé", "length"),
    ]
    token = first[0]["token_ids"][0]
    assert first[0]["logprobs"][0][str(token)] == {
        "logprob": pytest.approx(0, abs=1e-2),
        "rank": 1,
        "decoded_token": "x",
    }
    figures = result["figures"]
    assert (figures["requests"], figures["prompt_tokens"], figures["output_tokens"]) == (2, 2, 24)
    assert figures["tokens_per_second"] == pytest.approx(26 / figures["seconds"])
    assert figures["ttft_ms"].keys() == figures["tpot_ms"].keys() == {"p50", "p95"}
    assert 0 <= figures["padding_share"] < 1
    assert figures["compiles_after_warmup"] == 0
    assert result["kv_pool"]["tokens"] == 256


def test_generate_reads_a_file_and_standard_input(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("a\n\nw\n")
    _, out, _ = run("generate", "--file", str(tmp_path / "prompts.txt"), "--max-tokens", "2")
    assert "[1] abc\n" in out
    assert "[2] wxy\n" in out
    _, out, _ = run("generate", "--file", "-", "--stop", "d", "--include-stop-str-in-output", stdin="a\n")
    assert "[1] abcd\n" in out


def test_generate_in_the_chat_template(run):
    _, out, _ = run("generate", "q", "--chat", "--max-tokens", "3")  # the template ends in A
    assert "[1] q\nBCD\n" in out


def test_chat_by_pipe(run):
    code, out, _ = run("chat", "--max-tokens", "3", *TEMPERATURE, stdin="q\n\nr\n/reset\ns\n/exit\nt\n")
    assert (code, out) == (0, "BCD\nBCD\nBCD\n")


def test_chat_sends_the_history(run, monkeypatch):
    sent = []
    original = LLM.chat_token_ids
    monkeypatch.setattr(LLM, "chat_token_ids", lambda self, messages: sent.append(messages) or original(self, messages))
    run("chat", "--system", "x", "--max-tokens", "2", stdin="q\nr\n/reset\ns\n")
    system, question = {"role": "system", "content": "x"}, {"role": "user", "content": "q"}
    assert sent[1] == [system, question]
    assert sent[2] == [system, question, {"role": "assistant", "content": "BC"}, {"role": "user", "content": "r"}]
    assert sent[3] == [system, {"role": "user", "content": "s"}]


def test_chat_survives_a_message_that_does_not_fit(run):
    code, out, err = run("chat", "--max-tokens", "2", stdin=f"{'q' * 200}\nr\n")
    assert (code, out) == (0, "BC\n")
    assert "200" in err or "201" in err


def test_ctrl_c_stops_the_answer_and_no_more(run, monkeypatch):
    pressed = []

    def press(self):
        if not pressed and self.has_unfinished_requests():
            pressed.append(signal.raise_signal(signal.SIGINT))
        return step(self)

    step = Engine.step
    monkeypatch.setattr(Engine, "step", press)
    before = signal.getsignal(signal.SIGINT)
    code, out, _ = run("chat", "--max-tokens", "9", stdin="q\nr\n")
    assert (code, out) == (0, "B\nBCDEFGHIJ\n")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_with_130_and_one_line(run, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    code, out, err = run("generate", "a")
    assert (code, out) == (130, "")
    assert err.endswith("\npaxserve: interrupted\n")


def test_a_reader_that_leaves_early_is_no_error(engine_flags):
    command = [sys.executable, "-m", "paxserve", "info", "--json", *engine_flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 128 + signal.SIGPIPE


def test_info_states_what_a_running_engine_uses(run, engine_flags):
    code, out, _ = run("info", "--json", "--dtype", "bfloat16")
    assert code == 0
    facts = json.loads(out)
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    engine = LLM(**engine_options(parser.parse_args([*engine_flags, "--dtype", "bfloat16"]))).engine
    bfloat16 = dict.fromkeys(("weights", "kernels", "kv"), "bfloat16")
    assert facts["dtypes"] == {"checkpoint": "float32", **bfloat16}
    assert facts["dtypes"]["kv"] == engine.runner.dtype.name
    assert facts["model"]["weight_bytes"] == engine.runner.weight_bytes
    assert facts["engine"]["scan_layers"] == engine.runner.scan_layers
    assert facts["engine"]["buckets"] == [str(bucket) for bucket in engine.runner.buckets]
    assert facts["engine"]["max_model_len"] == engine.limits.max_model_len
    assert facts["kv_pool"]["num_pages"] == engine.limits.num_pages
    assert facts["kv_pool"]["bytes"] == engine.runner.state.kv_pages.nbytes


def test_info_for_a_person(run):
    code, out, _ = run("info")
    assert code == 0
    assert "  bytes per token " in out
    assert "decode 2" in out


def test_footprint_of_several_models(model, capsys):
    names = ["llama-2-7b", "opt-13b", "smollm2", str(model)]
    assert (
        main(["footprint", *names, "--context", "1000", "--batch", "3", "--mesh", "data=3", "--kv-dtype", "int8"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "KV cache of 3 x 1,000 tokens, 32 pages of 32 each, on 3 chips"
    (llama,) = (line.split() for line in lines if "llama-2-7b" in line)
    assert llama[1:4] == ["int8", "262,144", "262,144"]
    assert [" ".join(pair) for pair in zip(llama[4:12:2], llama[5:12:2], strict=True)] == [
        "250 MiB",
        "256 MiB",
        "768 MiB",
        "256 B",
    ]
    assert [line.split()[0] for line in lines if " int8 " in line] == ["llama-2-7b", "opt-13b", "smollm2", model.name]


def test_footprint_shows_windows_and_what_latents_spare(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2_some_windows"]))
    assert main(["footprint", "deepseek-v3", str(tmp_path / "config.json"), "--context", "32"]) == 0
    out = capsys.readouterr().out
    assert "K, V of" in out
    assert "within" in out
    latent, windowed = (line.split() for line in out.splitlines() if "bfloat16" in line or "float32" in line)
    assert latent[3:5] == ["70,272", "4,997,120"]
    # Of 32 tokens, one of the two layers sees 8.
    assert windowed[4:] == ["64", "KiB", "40", "KiB", "64", "KiB"]


def test_footprint_json_and_plot(capsys, tmp_path):
    plot = tmp_path / "plot.png"
    argv = ["footprint", "llama-3.1-70b", "mistral-7b-v0.3", "--context", "131072", "--mesh", "16", "--json"]
    assert main([*argv, "--plot", str(plot)]) == 0
    llama, mistral = json.loads(capsys.readouterr().out)
    assert llama["sequence_bytes"] == llama["batch_bytes"] == 40 * 2**30
    assert llama["mesh"] == {"data": 1, "kv_head": 8, "kv_page": 2}
    assert llama["bytes_per_chip"] == 40 * 2**30 // 16
    assert mistral["model"] == "mistral-7b-v0.3"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_footprint_plot_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["footprint", "opt-13b", "--context", "64", "--plot", "plot.png"]) == 2
    assert capsys.readouterr().err == 'paxserve: error: --plot needs matplotlib: pip install "paxserve[notebook]"\n'


def test_convert(model, engine_flags, tmp_path, capsys):
    assert main(["convert", str(model), str(tmp_path / "converted"), "--dtype", "bfloat16"]) == 0
    flags = [str(tmp_path / "converted") if flag == str(model) else flag for flag in engine_flags]
    assert main(["generate", "a", "--max-tokens", "3", *flags]) == 0
    assert "[1] abcd\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "--model", "nothing/here"], "no model 'nothing/here'"),
        (["generate", "--model", "MODEL", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "--model", "MODEL", "--num-pages", "1"], "the KV pool would have 1 pages"),
        (["generate", "--model", "MODEL", "--file", "nothing.txt"], "No such file or directory: 'nothing.txt'"),
        (["generate", "a", "--model", "MODEL", "--file", "-"], "give one of the two"),
        (["info", "--model", "MODEL", "--attention", "magic"], "attention='magic'"),
        (["info", "--model", "MODEL", "--max-model-len", "4096"], "the model's context ends at 128"),
        (["convert", "MODEL", "MODEL"], "exists already"),
        (["footprint", "llama-9", "--context", "1"], "no model 'llama-9'"),
        (["footprint", "opt-13b", "--context", "0"], "context=0"),
        (["footprint", "opt-13b", "--context", "1", "--mesh", "two"], "mesh 'two'"),
        (["footprint", "opt-13b", "--context", "1", "--plot", "plot.doc"], "--plot plot.doc: must end in .png"),
    ],
)
def test_a_users_mistake_is_one_line(argv, message, model, capsys):
    assert main([str(model) if word == "MODEL" else word for word in argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("paxserve: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(generate, "_prompts", lambda args: json.loads("{"))  # raises ValueError in a library
    with pytest.raises(ValueError, match="Expecting property name"):
        main(["generate"])


def flags_of(cls):
    parser = argparse.ArgumentParser()
    add_engine_options(parser) if cls is EngineConfig else add_sampling_options(parser)
    return parser


@pytest.mark.parametrize(("cls", "without"), [(EngineConfig, set()), (SamplingParams, {"seed"})])
def test_every_field_has_a_flag_with_help(cls, without):
    actions = {action.dest: action for action in flags_of(cls)._actions}
    names = {field.name for field in dataclasses.fields(cls)} - without
    assert actions.keys() - {"help"} == names
    assert all(len(actions[name].help) > 8 for name in names)


def test_flags_become_options():
    argv = "--dtype bfloat16 --no-async-scheduling --scan-layers --num-pages 9 --memory-fraction 0.5"
    args = flags_of(EngineConfig).parse_args([*argv.split(), "--compilation-cache-dir", "none"])
    expected = {
        "model": "smollm2",
        "dtype": "bfloat16",
        "async_scheduling": False,
        "scan_layers": True,
        "num_pages": 9,
        "memory_fraction": 0.5,
        "compilation_cache_dir": None,
    }
    assert engine_options(args) == expected


def test_flags_become_sampling_params():
    argv = "--stop a --stop bc --stop-token-ids 3 --logit-bias 5=-1.5 --logit-bias 7=2 --max-tokens none"
    args = flags_of(SamplingParams).parse_args([*argv.split(), "--ignore-eos", "--top-k", "-1"])
    assert sampling_params(args) == SamplingParams(
        stop=["a", "bc"], stop_token_ids=[3], logit_bias={5: -1.5, 7: 2.0}, max_tokens=None, ignore_eos=True, top_k=0
    )


@pytest.mark.parametrize("argv", [["--logit-bias", "5"], ["--dtype", "int3"], ["--max-tokens", "many"]])
def test_a_malformed_flag_is_refused(argv, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["generate", *argv])
    assert exit.value.code == 2
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize("command", [command.__name__.rpartition(".")[2] for command in COMMANDS])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0
    assert f"paxserve {command}" in capsys.readouterr().out
