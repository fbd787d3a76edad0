"""The device side of the engine: weights, KV pages, and the compiled programs that run plans."""

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from paxserve.buckets import Bucket, choose_bucket
from paxserve.compile_watch import CompileWatch
from paxserve.config import EngineConfig
from paxserve.model_source import ModelSource
from paxserve.models.config import ModelConfig
from paxserve.models.config_quantization import check_quantization
from paxserve.models.kv_shape import kv_shape
from paxserve.pack import check_inputs, pack, pack_sampling, sampling_key
from paxserve.pallas_kernels import GQASizes, MLASizes, choose_implementation, storage_dtype
from paxserve.programs import PROMPT_LOGPROB_ROWS, ProgramBuilder, Progress
from paxserve.sampler import LogprobsBatch, SamplingBatch
from paxserve.scheduler import PlannedRow, StepPlan
from paxserve.sharding import MeshShape, make_mesh, mesh_shape, shape_of
from paxserve.sizing import device_memory, size_limits
from paxserve.step import EVERYWHERE, GROUP, GROUP_AND_PAGES, INPUTS, StepOutputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InFlight:
    """A step that was dispatched, with the plan of every data group: its outputs may still be being computed."""

    plans: tuple[StepPlan, ...]
    bucket: Bucket
    outputs: StepOutputs
    prompt_logprobs: dict[PlannedRow, list[LogprobsBatch]]


def make_builder(model: ModelConfig, config: EngineConfig, devices: Sequence[jax.Device]) -> ProgramBuilder:
    """The builder of an engine's programs, with what the options leave open decided by the model and the devices.

    Raises NotImplementedError if the attention implementation that the options name cannot do what is asked, ValueError
    for a quantization that the checkpoint does not have and for a mesh that the model cannot be spread over.
    """
    check_quantization(config.quantization, model)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    shape = mesh_shape(config.mesh or str(len(devices)), kv_shape(model).heads)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    platform = devices[0].platform
    sizes = _attention_sizes(model, config.page_size, shape)
    stored = storage_dtype(kv_dtype, platform)
    mesh = make_mesh(shape, devices=devices)
    return ProgramBuilder(
        model,
        mesh,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=config.quantization,
        scan_layers=platform == "tpu" if config.scan_layers is None else config.scan_layers,
        page_size=config.page_size,
        attention=choose_implementation(
            config.attention, mesh.abstract_mesh.abstract_device, dtype, stored, sizes=sizes
        ),
    )


def _attention_sizes(model: ModelConfig, page_size: int, mesh: MeshShape) -> GQASizes | MLASizes:
    """Those of the attention that one device computes."""
    if mla := model.mla:
        return MLASizes(model.num_heads, mla.kv_lora_rank, mla.qk_rope_head_dim, page_size)
    return GQASizes(model.num_heads // mesh.kv_head, model.num_kv_heads // mesh.kv_head, model.head_dim, page_size)


class Runner:
    """Runs plans. Everything is compiled at construction; a compilation after that is counted and logged as an error."""

    def __init__(self, source: ModelSource, config: EngineConfig, progress: Progress) -> None:
        if config.compilation_cache_dir is not None:
            jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.compilation_cache_dir))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        devices = jax.devices()
        builder = make_builder(source.config, config, devices)
        self.dtype, self.kv_dtype = builder.dtype, builder.kv_dtype
        self.scan_layers, self.attention = builder.scan_layers, builder.attention
        memory = device_memory(jax.local_devices()[0])
        self.limits = size_limits(
            config, source.config, builder.kv_dtype.name, shape_of(builder.mesh), memory, builder.step_bytes
        )

        progress("loading weights", 0, 1)
        if config.load_format == "dummy":
            params = source.load_random(builder.declared, builder.mesh, config.seed)
        else:
            params = source.load(builder.declared, builder.mesh)
        self._params = tuple(jax.tree.leaves(params))
        progress("loading weights", 1, 1)

        self._programs = builder.compile(self.limits, progress)
        self._placed, self._debug = builder.placed, config.debug
        self.state = builder.init_state(self.limits)
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
        """Of the KV pages of all layers and devices, as they were allocated."""
        return self.state.kv_pages.nbytes

    @property
    def compiles_after_warmup(self) -> int:
        return self._watch.count

    def dispatch(self, plans: tuple[StepPlan, ...]) -> InFlight:
        """Start a step on the devices, without waiting for it."""
        bucket = choose_bucket(self.buckets, [[row.count for row in plan.rows] for plan in plans])
        before = self._watch.count
        with self._watch.counting():
            self._copy_pages(plans)
            for request in [request for plan in plans for request in plan.shared]:
                assert request.slot is not None
                self._set_history(request.group, request.slot, request.prompt_token_ids)
            inputs = pack(plans, bucket, self.limits)
            if self._debug:
                check_inputs(inputs, self.limits)
            inputs = self._put(inputs, INPUTS)
            sampling = self._pack_sampling(plans, bucket.seqs)
            self.state, outputs = self._programs.steps[bucket](self._params, self.state, inputs, sampling)
            prompt = {
                row: self._prompt_logprobs(row, plan, bucket, outputs)
                for plan in plans
                for row in plan.rows
                if _wants_prompt(row)
            }
        if self._watch.count > before:
            logger.error("a program was compiled after warm-up, in a step of bucket %s; this is a bug", bucket)
        return InFlight(plans, bucket, outputs, prompt)

    def _put(self, arrays: Any, specs: Any) -> Any:
        """Arrays that every host has, as the programs take them: with several hosts each gives what its devices hold."""
        if jax.process_count() == 1:
            return arrays

        def put(spec: PartitionSpec, array: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(array.shape, self._placed(spec), lambda index: array[index])

        return jax.tree.map(lambda spec, part: jax.tree.map(functools.partial(put, spec), part), specs, arrays)

    def _pack_sampling(self, plans: tuple[StepPlan, ...], seqs: int) -> SamplingBatch:
        """The sampling arrays on the devices, kept from the last step of this size if nothing changed."""
        key = sampling_key(plans)
        if seqs not in self._sampling or self._sampling[seqs][0] != key:
            batch = self._put(pack_sampling(plans, seqs), GROUP)
            if jax.process_count() == 1:
                batch = jax.device_put(batch, self._placed(GROUP))
            self._sampling[seqs] = key, batch
        return self._sampling[seqs][1]

    def _copy_pages(self, plans: tuple[StepPlan, ...]) -> None:
        if not any(plan.copies for plan in plans):
            return
        ranks = self.limits.mesh.kv_page
        pairs = np.zeros((2, len(plans), ranks, self.limits.max_num_seqs), np.int32)
        for group, plan in enumerate(plans):
            for index, (source, destination) in enumerate(plan.copies):
                pairs[:, group, source % ranks, index] = source // ranks, destination // ranks
        self.state = self._programs.copy_pages(self.state, *self._put(tuple(pairs), (GROUP_AND_PAGES,) * 2))

    def _set_history(self, group: int, slot: int, tokens: list[int]) -> None:
        row = np.zeros(self.limits.max_model_len, np.int32)
        row[: len(tokens)] = tokens
        place = self._put((np.int32(group), np.int32(slot), row), EVERYWHERE)
        self.state = self._programs.set_history(self.state, *place)

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
            group, indices, following = self._put((np.int32(row.request.group), *arrays), EVERYWHERE)
            hidden = self._programs.take_rows[bucket.tokens](outputs.hidden, group, indices)
            batches.append(self._programs.prompt_logprobs(self._params, hidden, following))
        return batches


def _wants_prompt(row: PlannedRow) -> bool:
    """Whether logprobs were asked for of prompt tokens that follow this row's; samples share those of the first one."""
    request = row.request
    wanted = request.params.prompt_logprobs is not None and request.parent is None
    return wanted and row.start < len(request.prompt_token_ids) - 1
