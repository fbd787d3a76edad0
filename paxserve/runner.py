"""The device side of the engine: weights, KV pages, and the compiled programs that run plans."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from paxserve.buckets import Bucket, choose_bucket
from paxserve.compile_watch import CompileWatch
from paxserve.config import EngineConfig
from paxserve.model_source import ModelSource
from paxserve.models.config import ModelConfig
from paxserve.models.config_quantization import check_quantization
from paxserve.pack import pack, pack_sampling, sampling_key
from paxserve.pallas_kernels import GQASizes, MLASizes, choose_implementation
from paxserve.programs import PROMPT_LOGPROB_ROWS, ProgramBuilder, Progress
from paxserve.sampler import LogprobsBatch, SamplingBatch
from paxserve.scheduler import PlannedRow, StepPlan
from paxserve.sharding import make_mesh
from paxserve.sizing import size_limits
from paxserve.step import StepOutputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InFlight:
    """A step that was dispatched: its outputs may still be being computed."""

    plan: StepPlan
    bucket: Bucket
    outputs: StepOutputs
    prompt_logprobs: dict[PlannedRow, list[LogprobsBatch]]


def make_builder(model: ModelConfig, config: EngineConfig, device: jax.Device) -> ProgramBuilder:
    """The builder of an engine's programs, with what the options leave open decided by the model and the platform.

    Raises NotImplementedError if the attention implementation that the options name cannot do what is asked, ValueError
    for a quantization that the checkpoint does not have.
    """
    check_quantization(config.quantization, model)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    sizes: GQASizes | MLASizes = GQASizes(model.num_heads, model.num_kv_heads, model.head_dim, config.page_size)
    if model.mla:
        sizes = MLASizes(model.num_heads, model.mla.kv_lora_rank, model.mla.qk_rope_head_dim, config.page_size)
    return ProgramBuilder(
        model,
        make_mesh(devices=[device]),
        dtype=dtype,
        quantization=config.quantization,
        scan_layers=device.platform == "tpu" if config.scan_layers is None else config.scan_layers,
        page_size=config.page_size,
        attention=choose_implementation(config.attention, device.platform, dtype, sizes=sizes),
    )


class Runner:
    """Runs plans. Everything is compiled at construction; a compilation after that is counted and logged as an error."""

    def __init__(self, source: ModelSource, config: EngineConfig, progress: Progress) -> None:
        if config.compilation_cache_dir is not None:
            jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.compilation_cache_dir))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        device = jax.local_devices()[0]
        builder = make_builder(source.config, config, device)
        self.dtype = builder.dtype
        self.scan_layers, self.attention = builder.scan_layers, builder.attention
        self.limits = size_limits(config, source.config, builder.dtype.name, device, builder.step_bytes)

        progress("loading weights", 0, 1)
        if config.load_format == "dummy":
            params = source.load_random(builder.declared, builder.mesh, config.seed)
        else:
            params = source.load(builder.declared, builder.mesh)
        self._params = tuple(jax.tree.leaves(params))
        progress("loading weights", 1, 1)

        self._programs = builder.compile(self.limits, progress)
        self._placement = builder.replicated
        zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), builder.state_shapes(self.limits))
        self.state = jax.device_put(zeros, self._placement)
        self._sampling: dict[int, tuple[tuple, SamplingBatch]] = {}
        self._watch = CompileWatch()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(self._programs.steps)

    @property
    def weight_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self._params)

    @property
    def kv_bytes(self) -> int:
        """Of the KV pages of all layers, as they were allocated."""
        return self.state.kv_pages.nbytes

    @property
    def compiles_after_warmup(self) -> int:
        return self._watch.count

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Start a plan's step on the device, without waiting for it."""
        bucket = choose_bucket(self.buckets, [row.count for row in plan.rows])
        before = self._watch.count
        with self._watch.counting():
            self._copy_pages(plan.copies)
            for request in plan.shared:
                assert request.slot is not None
                self._set_history(request.slot, request.prompt_token_ids)
            inputs = pack(plan, bucket, self.limits.pages_per_seq, padding_slot=self.limits.max_num_seqs)
            sampling = self._pack_sampling(plan.rows, bucket.seqs)
            self.state, outputs = self._programs.steps[bucket](self._params, self.state, inputs, sampling)
            prompt = {row: self._prompt_logprobs(row, plan, bucket, outputs) for row in plan.rows if _wants_prompt(row)}
        if self._watch.count > before:
            logger.error("a program was compiled after warm-up, in a step of bucket %s; this is a bug", bucket)
        return InFlight(plan, bucket, outputs, prompt)

    def _pack_sampling(self, rows: tuple[PlannedRow, ...], seqs: int) -> SamplingBatch:
        """The sampling arrays on the device, kept from the last step of this size if nothing changed."""
        key = sampling_key(rows)
        if seqs not in self._sampling or self._sampling[seqs][0] != key:
            self._sampling[seqs] = key, jax.device_put(pack_sampling(rows, seqs), self._placement)
        return self._sampling[seqs][1]

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            pairs = np.zeros((2, self.limits.max_num_seqs), np.int32)
            pairs[:, : len(copies)] = np.array(copies).T
            self.state = self._programs.copy_pages(self.state, pairs[0], pairs[1])

    def _set_history(self, slot: int, tokens: list[int]) -> None:
        row = np.zeros(self.limits.max_model_len, np.int32)
        row[: len(tokens)] = tokens
        self.state = self._programs.set_history(self.state, np.int32(slot), row)

    def _prompt_logprobs(
        self, row: PlannedRow, plan: StepPlan, bucket: Bucket, outputs: StepOutputs
    ) -> list[LogprobsBatch]:
        """Logprobs of the prompt tokens that follow the row's tokens, PROMPT_LOGPROB_ROWS at a time."""
        first = sum(other.count for other in plan.rows[: plan.rows.index(row)])
        targets = row.request.prompt_token_ids[row.start + 1 : row.start + row.count + 1]
        batches = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = targets[start : start + PROMPT_LOGPROB_ROWS]
            arrays = np.zeros((2, PROMPT_LOGPROB_ROWS), np.int32)
            arrays[0, : len(part)] = first + start + np.arange(len(part))
            arrays[1, : len(part)] = part
            hidden = self._programs.take_rows[bucket.tokens](outputs.hidden, arrays[0])
            batches.append(self._programs.prompt_logprobs(self._params, hidden, arrays[1]))
        return batches


def _wants_prompt(row: PlannedRow) -> bool:
    """Whether logprobs were asked for of prompt tokens that follow this row's; samples share those of the first one."""
    request = row.request
    wanted = request.params.prompt_logprobs is not None and request.parent is None
    return wanted and row.start < len(request.prompt_token_ids) - 1
