"""What a model would be on hardware that is not there: its real step compiled for it, its memory, and bounds on its speed.

The programs and the sizes are the engine's own (`make_builder`, `size_limits`, `ProgramBuilder`): only the devices and the
size of their memory are a description's.
"""

import contextlib
import dataclasses
import math
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from paxserve.buckets import Bucket, make_buckets
from paxserve.chips import Chip, Topology
from paxserve.config import EngineConfig
from paxserve.hlo import Collective, collectives
from paxserve.limits import Limits
from paxserve.models.config import ModelConfig
from paxserve.models.kv_shape import kv_shape
from paxserve.programs import ProgramBuilder
from paxserve.runner import make_builder
from paxserve.sharding import MeshShape, factor_tensor_parallel, shape_of
from paxserve.sizing import size_limits

COMPILERS = 2  # programs that are compiled at a time


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, by the compiler's account of the step that needs most, and the code of all that were compiled.

    device: all there are. The engine sizes its pool within `memory_fraction` of them.
    """

    device: int
    weights: int
    kv_pages: int
    other_inputs: int
    temporaries: int
    code: int

    @property
    def left(self) -> int:
        return self.device - self.weights - self.kv_pages - self.other_inputs - self.temporaries - self.code


@dataclass(frozen=True)
class Bound:
    """Seconds that a step takes at least, by what it reads, computes and sends; latencies are left out of all three.

    tokens: that the step yields on all devices: drawn in a decode, taken in for a prefill.
    """

    memory_seconds: float
    compute_seconds: float
    link_seconds: float
    tokens: int

    @property
    def seconds(self) -> float:
        """Memory and compute overlap at best, and what the devices send one another overlaps with neither."""
        return max(self.memory_seconds, self.compute_seconds) + self.link_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Plan:
    """A model on a topology. `problem` says why it cannot run there; what could not be worked out then is None or empty.

    context: tokens of the requests that `requests` counts: those whose pages all fit at once, over all data groups.
    running: how many of them a step advances, max_num_seqs of a data group at most.
    compile_seconds: by bucket. communication: of the decode step, by kind, how often and how many bytes each device sends.
    """

    model: str
    topology: str
    chip: Chip
    mesh: MeshShape
    weights: str
    kv: str
    context: int
    problem: str | None = None
    attention: str | None = None
    limits: Limits | None = None
    memory: Memory | None = None
    kv_tokens: int = 0
    requests: int = 0
    running: int = 0
    compile_seconds: dict[str, float] | None = None
    communication: dict[str, tuple[int, float]] | None = None
    decode: Bound | None = None
    prefill: Bound | None = None


def make_plan(
    model: ModelConfig, config: EngineConfig, topology: Topology, context: int, *, largest_only: bool = False
) -> Plan:
    """Compiles the engine's steps for a topology. `config.mesh` is the mesh, by default all devices as one data group.

    largest_only: of decodes and of mixed steps only the largest, which decide on memory and on the bounds.

    Raises what `make_builder` raises for a mesh or an option that cannot be; a model that does not fit is a plan with a
    problem.
    """
    builder = make_builder(model, config, topology.devices)
    mesh = shape_of(builder.mesh)
    known: dict[str, Any] = {
        "model": config.model,
        "topology": topology.text,
        "chip": topology.chip,
        "mesh": mesh,
        "weights": config.quantization or builder.dtype.name,
        "kv": builder.kv_dtype.name,
        "context": context,
        "attention": builder.attention,
    }
    try:
        memory = None if topology.chip.platform == "cpu" else topology.chip.memory_bytes
        limits = size_limits(config, model, builder.kv_dtype.name, mesh, memory, builder.step_bytes)
        compiled, seconds = _compile(builder, limits, largest_only)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return Plan(**known, problem=_first_sentence(error))
    buckets = list(compiled)
    decode = max(bucket for bucket in buckets if bucket.decode)
    prefill = max(bucket for bucket in buckets if not bucket.decode)
    sent = {bucket: collectives(compiled[bucket].as_text() or "") for bucket in (decode, prefill)}
    requests = limits.pool_tokens // _in_pages(context, limits)  # of a data group
    running = min(requests, limits.max_num_seqs)
    cost = _Cost(model, builder, mesh, topology.chip)
    return Plan(
        **known,
        limits=limits,
        memory=_memory(builder, limits, topology.chip, list(compiled.values())),
        kv_tokens=limits.pool_tokens * mesh.data,
        requests=requests * mesh.data,
        running=running * mesh.data,
        compile_seconds={str(bucket): round(seconds[bucket], 1) for bucket in buckets},
        communication=_by_kind(sent[decode]),
        decode=cost.bound(max(running, 1), context, _sent(sent[decode])),
        prefill=cost.bound(prefill.tokens, 0, _sent(sent[prefill])),
    )


def search(model: ModelConfig, config: EngineConfig, topology: Topology, context: int) -> list[Plan]:
    """Plans for every mesh over all devices that the model can be spread over, best first: by decoded tokens per second."""
    devices, kv_heads = len(topology.devices), kv_shape(model).heads
    plans = []
    for data in (count for count in range(1, devices + 1) if devices % count == 0):
        kv_head, kv_page = factor_tensor_parallel(devices // data, kv_heads)
        mesh = MeshShape(data, kv_head, kv_page)
        with contextlib.suppress(ValueError):  # it cannot be split that way
            plans.append(
                make_plan(model, dataclasses.replace(config, mesh=str(mesh)), topology, context, largest_only=True)
            )
    return sorted(plans, key=lambda plan: -plan.decode.tokens_per_second if plan.decode else 1)


def _compile(
    builder: ProgramBuilder, limits: Limits, largest_only: bool
) -> tuple[dict[Bucket, jax.stages.Compiled], dict[Bucket, float]]:
    seconds: dict[Bucket, float] = {}

    def run(bucket: Bucket) -> jax.stages.Compiled:
        lowered = builder.lower_step(bucket, limits)
        start = time.monotonic()
        compiled = lowered.compile()
        seconds[bucket] = time.monotonic() - start
        return compiled

    buckets = make_buckets(limits.max_num_seqs, limits.max_num_batched_tokens)
    if largest_only:
        buckets = tuple(max(b for b in buckets if b.decode == decode) for decode in (True, False))
    with ThreadPoolExecutor(COMPILERS) as pool:
        return dict(zip(buckets, pool.map(run, buckets), strict=True)), seconds


def _memory(builder: ProgramBuilder, limits: Limits, chip: Chip, compiled: list[jax.stages.Compiled]) -> Memory:
    accounts: list[Any] = [each.memory_analysis() for each in compiled]
    most = max(accounts, key=lambda account: account.argument_size_in_bytes + account.temp_size_in_bytes)
    weights = sum(map(_shard_bytes, builder.params))
    kv_pages = _shard_bytes(builder.state_shapes(limits).kv_pages)
    arguments = most.argument_size_in_bytes + most.output_size_in_bytes - most.alias_size_in_bytes
    return Memory(
        device=chip.memory_bytes,
        weights=weights,
        kv_pages=kv_pages,
        other_inputs=arguments - weights - kv_pages,
        temporaries=most.temp_size_in_bytes,
        code=sum(account.generated_code_size_in_bytes for account in accounts),
    )


class _Cost:
    """Bytes and operations of a step on one device."""

    def __init__(self, model: ModelConfig, builder: ProgramBuilder, mesh: MeshShape, chip: Chip) -> None:
        self.model, self.mesh, self.chip = model, mesh, chip
        self.kv_dtype = builder.kv_dtype.name
        self.dense = self.dense_bytes = self.experts = self.expert_bytes = 0
        for path, param in nnx.to_flat_state(builder.declared):
            if path[:1] == ("embed",) and not model.tie_word_embeddings:
                continue  # of which a row is read per token
            size = param.size * param.dtype.itemsize
            if "expert" in param.axes:
                self.experts += param.size
                self.expert_bytes += size
            else:
                self.dense += param.size
                self.dense_bytes += size

    def bound(self, tokens: int, context: int, sent: float) -> Bound | None:
        """Of a step in which a data group has `tokens` tokens, each with a context; experts are chosen evenly.

        None for a chip whose rates are not known.
        """
        model, mesh, chip = self.model, self.mesh, self.chip
        if not chip.memory_gb_s:
            return None
        share = model.moe.experts_per_token / model.moe.num_experts if model.moe else 0.0
        touched = 1 - (1 - share) ** (tokens * mesh.data)
        read = self.dense_bytes / mesh.tensor + self.expert_bytes * touched / mesh.chips
        read += tokens * kv_shape(model).visible_bytes(context, self.kv_dtype) / mesh.tensor
        per_key = 2 * model.num_heads * 2 * model.head_dim
        if model.mla:
            per_key = 2 * model.num_heads * (model.mla.cached_dim + model.mla.kv_lora_rank)
        keys = kv_shape(model).visible_bytes(context, self.kv_dtype) / max(
            kv_shape(model).visible_bytes(1, self.kv_dtype), 1
        )
        flops = tokens * (2 * (self.dense + self.experts * share) + per_key * keys * model.num_layers) / mesh.tensor
        return Bound(
            read / (chip.memory_gb_s * 1e9),
            flops / (chip.bf16_tflop_s * 1e12),
            sent / (chip.link_gb_s * 1e9),
            tokens * mesh.data,
        )


def _in_pages(context: int, limits: Limits) -> int:
    return -(-context // limits.page_size) * limits.page_size


def _by_kind(found: Counter[Collective]) -> dict[str, tuple[int, float]]:
    kinds: dict[str, tuple[int, float]] = {}
    for collective, times in found.items():
        count, sent = kinds.get(collective.kind, (0, 0.0))
        kinds[collective.kind] = count + times, sent + times * collective.sent
    return kinds


def _sent(found: Counter[Collective]) -> float:
    return sum(times * collective.sent for collective, times in found.items())


def _shard_bytes(array: Any) -> int:
    """What a device holds of an array or of its shape struct."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
