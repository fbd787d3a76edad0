"""The input log: what is recorded of a run, and that replaying it gives the same tokens, on other limits too."""

import json
import math

import pytest
from engine_models import write_random
from recorded_run import ABORTED, record_run

from paxserve import SamplingParams
from paxserve.cli import main
from paxserve.input_log import Abort, Arrival, Ended, Entry, differences, read_log


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_random(directory)
    return directory


@pytest.fixture(scope="module")
def recorded(model, small_engine, tmp_path_factory):
    """(log file, outputs by request) of a run with everything in it."""
    file = tmp_path_factory.mktemp("log") / "run.jsonl"
    return file, record_run(model, file, small_engine)


def flags(options):
    return [str(part) for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]


def test_the_log_holds_what_came_in_and_what_went_out(recorded):
    file, outputs = recorded
    log = read_log(file)
    inputs = [each for entry in log.entries for each in entry.inputs]
    arrivals = {each.request_id: each for each in inputs if isinstance(each, Arrival)}
    assert arrivals.keys() == outputs.keys() == log.ended.keys()
    assert [each.request_id for each in inputs if isinstance(each, Abort)] == [ABORTED]
    for name, output in outputs.items():
        assert arrivals[name].prompt_token_ids == output.prompt_token_ids
        assert log.ended[name] == Ended.of(output)
    assert all(each.params.seed is not None for each in arrivals.values())
    assert [entry.now for entry in log.entries] == sorted(entry.now for entry in log.entries)


@pytest.mark.parametrize(
    "limits", [{}, {"page_size": 16, "num_pages": 10, "max_num_batched_tokens": 8, "max_num_seqs": 2}]
)
def test_a_replay_gives_the_same_tokens(recorded, small_engine, limits, capsys, tmp_path):
    file, outputs = recorded
    again = tmp_path / "again.jsonl"
    options = {"compilation_cache_dir": small_engine["compilation_cache_dir"], **limits, "record": again}
    assert main(["replay", str(file), *flags(options), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["differences"] == []
    found = {each["request_id"]: [sample["token_ids"] for sample in each["outputs"]] for each in result["outputs"]}
    assert found.keys() == outputs.keys()
    for name in outputs.keys() - {ABORTED}:
        assert found[name] == [sample.token_ids for sample in outputs[name].outputs]
    if not limits:  # the same steps, and not only the same tokens
        first, second = read_log(file), read_log(again)
        assert [(e.now, e.check, e.inputs) for e in first.entries] == [
            (e.now, e.check, e.inputs) for e in second.entries
        ]


def test_other_tokens_are_found(recorded, small_engine, capsys, tmp_path):
    lines = recorded[0].read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines) if '"ended": "2"' in line)
    record = json.loads(lines[number])
    record["token_ids"][0][3] += 1
    lines[number] = json.dumps(record)
    edited = tmp_path / "edited.jsonl"
    edited.write_text("\n".join(lines))
    cache = {"compilation_cache_dir": small_engine["compilation_cache_dir"]}
    assert main(["replay", str(edited), *flags(cache)]) == 1
    out = capsys.readouterr().out
    assert "request 2, sample 0: other tokens after the first 3\n" in out
    assert out.endswith(": not as recorded\n")


def test_a_log_that_broke_off_is_replayed_to_the_end(recorded, small_engine, capsys, tmp_path):
    lines = recorded[0].read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if '"ended"' in line)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join(lines[: first + 1]) + "\n")
    cache = {"compilation_cache_dir": small_engine["compilation_cache_dir"]}
    assert main(["replay", str(broken), *flags(cache)]) == 0
    out = capsys.readouterr().out
    assert " of 1 requests: as recorded\n" in out
    assert "requests were not recorded to their end\n" in out


def test_another_model_is_refused(recorded, tmp_path, capsys, model):
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in model.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        (tmp_path / file.name).write_bytes(data)
    assert main(["replay", str(recorded[0]), "--model", str(tmp_path)]) == 2
    assert "was recorded with another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not an input log"),
        ("hello", "not an input log"),
        ('{"format_version": 9}', "format_version is 9; supported is 1"),
    ],
)
def test_other_files_are_refused(text, message, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text(text)
    assert main(["replay", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_a_replay_does_not_overwrite_its_log(recorded, capsys):
    assert main(["replay", str(recorded[0]), "--record", str(recorded[0])]) == 2
    assert "name another file" in capsys.readouterr().err


def test_entries_survive_json():
    params = SamplingParams(
        n=2, temperature=0.3, top_k=-1, seed=-5, stop=["a", "é"], stop_token_ids=[4], logit_bias={3: -math.inf, 4: 1.5}
    )
    inputs = (Arrival("x", [1, 2], params, -3), Abort("y"), Arrival("z", [], SamplingParams(), 0))
    entry = Entry(1.25, 7, inputs)
    assert Entry.from_json(json.loads(json.dumps(entry.to_json(), allow_nan=False))) == entry


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (([[1, 2]], ["stop"]), ([[1, 2]], ["stop"]), 0),
        (([[1, 2]], ["stop"]), ([[1, 3]], ["stop"]), 1),
        (([[1, 2]], ["length"]), ([[1, 2, 3]], ["length"]), 1),
        (([[1, 2]], ["abort"]), ([[1, 2, 3]], ["length"]), 0),
        (([[1, 2]], ["abort"]), ([[1, 4, 3]], ["length"]), 1),
        (([[1, 2], [5]], ["stop", "stop"]), ([[1, 3], [6]], ["stop", "stop"]), 2),
    ],
)
def test_differences(before, after, count):
    assert len(differences(Ended("r", *before), Ended("r", *after))) == count
