"""`paxserve convert`: any readable checkpoint to a directory that loads sharded."""

import argparse
from typing import Any

from paxserve.cli.options import subparser

EPILOG = """\
examples:
  paxserve convert smollm2 ./smollm2-bf16 --dtype bfloat16
  paxserve convert ./Qwen3-0.6B ./qwen3 && paxserve chat --model ./qwen3"""


def add_parser(subparsers: Any) -> None:
    parser = subparser(
        subparsers,
        "convert",
        help="write a model as an Orbax checkpoint, with its tokenizer",
        description="Write a model (a Hugging Face directory, a GGUF file) to a new directory, as an Orbax checkpoint with\n"
        "its configuration and tokenizer beside it. Quantised weights are dequantised, unless FP8 is to be kept.",
        epilog=EPILOG,
    )
    parser.add_argument("src", metavar="SRC", help="a name, a .gguf file or a directory, as for --model")
    parser.add_argument("dst", metavar="DST", help="the new directory; it must not exist")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: what the source says)")
    parser.add_argument("--quantization", choices=("fp8",), help="keep FP8 weights as they are")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from paxserve.checkpoints.convert import convert

    convert(args.src, args.dst, args.dtype, args.quantization)
    print(f"wrote {args.dst}")
    return 0
