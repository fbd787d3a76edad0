"""`paxserve generate`: many prompts at once, their texts, and the figures of the run."""

import argparse
import dataclasses
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paxserve.cli.options import add_engine_options, add_sampling_options, engine_options, sampling_params, subparser

if TYPE_CHECKING:
    from paxserve.llm import LLM
    from paxserve.outputs import RequestOutput

PROMPTS = (
    "The capital of France is",
    "Gravity is the force that",
    "Once upon a time, in a village by the sea,",
    "The three states of matter are",
    "To make a good cup of tea, first",
    "In 1969, the first humans",
    "Photosynthesis is the process by which",
    "The difference between a list and a tuple in Python is",
)

EPILOG = """\
examples:
  paxserve generate                                          the built-in prompts
  paxserve generate "The sky is" "Grass is" --max-tokens 32  your own, advanced together
  paxserve generate --file prompts.txt --json > out.json     one prompt per line; texts, token ids and figures as JSON
  echo "Why is the sky blue?" | paxserve generate --chat --file -
  paxserve generate "A haiku:" --temperature 0.9 --n 4       four samples of one prompt

Bars and the size of the KV pool go to standard error, texts and figures to standard output."""


def add_parser(subparsers: Any) -> None:
    parser = subparser(
        subparsers,
        "generate",
        help="generate text for prompts, all of them at once",
        description="Generate text for prompts, advanced together by continuous batching, and print the run's figures.",
        epilog=EPILOG,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="by default several built-in ones")
    parser.add_argument("--file", metavar="FILE", help="read prompts from a file, one per line; - is standard input")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user's message in the chat template")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead: outputs, figures and the pool"
    )
    add_sampling_options(parser, max_tokens=64, temperature=0.0)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prompts, params = _prompts(args), sampling_params(args)

    from paxserve.cli.figures import engine_pool, figures, pool_line
    from paxserve.llm import LLM

    llm = LLM(progress=True, **engine_options(args))
    with closing(llm.engine):
        print(pool_line(llm.engine), file=sys.stderr)
        inputs = [_chat_prompt(llm, prompt) for prompt in prompts] if args.chat else prompts
        start = time.monotonic()
        outputs = llm.generate(inputs, params, use_tqdm=True)
        numbers = figures(outputs, llm.engine, time.monotonic() - start)
        if args.json:
            requests = [
                {**dataclasses.asdict(output), "prompt": prompt}
                for output, prompt in zip(outputs, prompts, strict=True)
            ]
            json.dump(
                {"model": args.model, "outputs": requests, "figures": numbers, "kv_pool": engine_pool(llm.engine)},
                sys.stdout,
            )
            print()
        else:
            _show(prompts, outputs, numbers, chat=args.chat)
    return 0


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.file is None:
        return args.prompts or list(PROMPTS)
    if args.prompts:
        raise ValueError(f"--file {args.file} and prompts on the command line: give one of the two")
    text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"--file {args.file} holds no prompt: write one per line")
    return prompts


def _chat_prompt(llm: "LLM", prompt: str) -> dict[str, list[int]]:
    return {"prompt_token_ids": llm.chat_token_ids([{"role": "user", "content": prompt}])}


def _show(prompts: list[str], outputs: "list[RequestOutput]", numbers: dict[str, Any], *, chat: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from paxserve.cli.figures import table

    console = Console(highlight=False)
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 1):
        for sample in output.outputs:
            name = f"{number}" if len(output.outputs) == 1 else f"{number}.{sample.index + 1}"
            answer = f"\n{sample.text.strip()}" if chat else sample.text
            console.print(Text.assemble((f"[{name}] ", "bold cyan"), (prompt, "bold"), answer), soft_wrap=True)
        console.print()
    console.print(table(numbers))
