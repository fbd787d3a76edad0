"""`paxserve chat`: a conversation in the terminal, answers streamed as they are written."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from paxserve.cli.options import add_engine_options, add_sampling_options, engine_options, sampling_params, subparser

if TYPE_CHECKING:
    from paxserve.llm import LLM
    from paxserve.sampling_params import SamplingParams

EPILOG = """\
examples:
  paxserve chat
  paxserve chat --system "Answer in one sentence." --temperature 0
  printf 'Name a colour.\\nAnother one.\\n' | paxserve chat     one message per line

In the conversation: /reset forgets it, /exit or Ctrl-D leaves. Ctrl-C stops the answer being written, and leaves when
there is none."""


def add_parser(subparsers: Any) -> None:
    parser = subparser(
        subparsers,
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model. The conversation is kept and sent in the model's chat template.",
        epilog=EPILOG,
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message that opens the conversation")
    add_sampling_options(
        parser, without=("n", "logprobs", "prompt_logprobs", "detokenize"), max_tokens=512, temperature=0.7, top_p=0.95
    )
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)

    from paxserve.cli.figures import pool_line
    from paxserve.llm import LLM

    llm = LLM(progress=True, **engine_options(args))
    with closing(llm.engine):
        print(pool_line(llm.engine), file=sys.stderr)
        opening = [] if args.system is None else [{"role": "system", "content": args.system}]
        llm.chat_token_ids([*opening, {"role": "user", "content": ""}])  # a model without a template is refused here
        history = list(opening)
        for message in _messages():
            if message == "/exit":
                break
            if message == "/reset":
                history = list(opening)
                continue
            turn = {"role": "user", "content": message}
            try:
                token_ids = llm.chat_token_ids([*history, turn])
                answer = _answer(llm, token_ids, params)
            except ValueError as error:
                print(f"paxserve: {error}", file=sys.stderr)
                continue
            history += [turn, {"role": "assistant", "content": answer}]
    return 0


def _messages() -> Iterator[str]:
    """What the user types, one line at a time; a prompt is shown only to a person."""
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    import readline  # noqa: F401 (gives `input` editing and history)

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line


def _answer(llm: "LLM", token_ids: list[int], params: "SamplingParams") -> str:
    """Writes the answer to standard output as it comes; returns what was written, all of it or up to Ctrl-C."""
    written = ""
    with _interrupts() as interrupted, closing(llm.stream({"prompt_token_ids": token_ids}, params)) as stream:
        for output in stream:
            text = output.outputs[0].text
            print(text[len(written) :], end="", flush=True)
            written = text
            if interrupted:
                break
    print()
    return written


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The Ctrl-Cs pressed inside: the first is noted, so that no step is torn apart; the second raises."""
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
