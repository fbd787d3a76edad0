"""The engine's options, as the user gives them."""

import re
from dataclasses import dataclass
from typing import Literal

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "float8_e4m3fn")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of `LLM` and of the command line. None means chosen at start; `paxserve info` shows what was chosen.

    model: name of a packaged model or of a built-in configuration, a .gguf file or a directory.
    dtype: of weights, activations and, unless kv_cache_dtype differs, KV: "auto" (the checkpoint's), "float32", "bfloat16" or
        "float16".
    quantization: "fp8" keeps the weights of a checkpoint in DeepSeek-V3's FP8 format as they are, a byte each; by default
        they are dequantised when loaded. Either way the numbers are the same.
    load_format: "auto" reads the checkpoint, "dummy" draws random weights (a configuration is enough).
    max_model_len: longest sequence, prompt and answer, in tokens; by default the model's, or what the KV pool holds if less.
    kv_cache_dtype: of cached values: "auto" (as `dtype`) or one of KV_DTYPES; float8_e4m3fn rounds K and V, each value alone.
    page_size: tokens per KV page.
    num_pages: pages of the KV pool on each device, the null page included.
    kv_cache_bytes: size of that pool in bytes instead; by default 1 GiB on CPU, on TPU and GPU what is left of
        memory_fraction after weights and the largest step.
    memory_fraction: of a TPU's or GPU's memory, what the engine may use (default 0.9); refused where it would not count.
    mesh: the devices to use, as `data` groups with sequences of their own times `kv_head` x `kv_page` devices that share each
        sequence: a number of devices, as in "8" (KV heads are split as far as they go, what remains splits pages), or axes
        by name, as in "data=2,kv_head=2,kv_page=2". By default all devices, as one group.
    max_num_seqs: sequences that a data group advances together at most (default 32 on CPU, 256 elsewhere).
    max_num_batched_tokens: tokens per step and data group at most; longer prompts are prefilled in chunks (default 1024 on
        CPU, else 2048).
    attention: implementation of paged attention, by name; None picks by platform.
    debug: check block tables and lengths on the host before every step.
    scan_layers: one `lax.scan` over stacked layers instead of unrolled ones; None picks by platform (True on TPU).
    async_scheduling: plan a step while the device still runs the one before it.
    compilation_cache_dir: where compiled programs are kept between runs; None leaves JAX's own setting alone.
    kv_trace: file that every page event is written to, as JSON lines.
    seed: for the draws of requests without a seed, and for dummy weights.
    record: file that all inputs are written to, step by step, as JSON lines; `paxserve replay` repeats the run from it.
    num_processes: processes that run one model together, started with the same options. On Cloud TPU VMs, on GKE and under
        Slurm this and the next two are found out; 1 ignores what is found.
    process_id: number of this process; 0 takes the requests, the others follow it.
    coordinator_address: HOST:PORT at which process 0 meets the others.
    start_timeout: seconds in which all processes must have started; who is missing then is named.
    peer_timeout: seconds without a sign of life after which a process counts as dead; that ends all others.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["fp8"] | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = None
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn"] = "auto"
    page_size: int = 32
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    memory_fraction: float | None = None
    mesh: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    attention: str | None = None
    debug: bool = False
    scan_layers: bool | None = None
    async_scheduling: bool = True
    compilation_cache_dir: str | None = "~/.cache/paxserve/xla"
    kv_trace: str | None = None
    seed: int = 0
    record: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    coordinator_address: str | None = None
    start_timeout: float = 300.0
    peer_timeout: float = 30.0

    def __post_init__(self) -> None:
        from paxserve.pallas_kernels import IMPLEMENTATIONS  # here, so that `paxserve --help` does not wait for JAX

        _choice("dtype", self.dtype, ("auto", *DTYPES))
        _choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", *KV_DTYPES))
        _choice("quantization", self.quantization, (None, "fp8"))
        _choice("load_format", self.load_format, ("auto", "dummy"))
        _choice("attention", self.attention, (None, *IMPLEMENTATIONS))
        for name in (
            "max_model_len",
            "page_size",
            "num_pages",
            "kv_cache_bytes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_processes",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction={self.memory_fraction}: must be in (0, 1]")
        if self.memory_fraction is not None and (self.num_pages or self.kv_cache_bytes):
            raise ValueError(
                "memory_fraction has no effect when num_pages or kv_cache_bytes sets the pool; drop one of them"
            )
        if self.num_pages is not None and self.kv_cache_bytes is not None:
            raise ValueError("num_pages and kv_cache_bytes both set the size of the KV pool; give one of them")
        for name in ("start_timeout", "peer_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be a positive number of seconds")
        address = self.coordinator_address
        if address is not None and not re.fullmatch(r".+:\d+", address):
            raise ValueError(f"coordinator_address={address!r}: must be HOST:PORT")


def _choice(name: str, value: object, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(str, choices))}")
