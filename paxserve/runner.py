"""The device side of the engine: weights, KV pages, and one compiled program per bucket."""

import functools
import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from paxserve.buckets import Bucket, choose_bucket, make_buckets
from paxserve.compile_watch import CompileWatch
from paxserve.config import CPU_KV_CACHE_BYTES, EngineConfig
from paxserve.model_source import ModelSource
from paxserve.models.params import abstract_params
from paxserve.models.registry import model_class
from paxserve.pack import pack, pack_sampling, sampling_key
from paxserve.pallas_kernels import copy_pages
from paxserve.sampler import LogprobsBatch, SamplingBatch
from paxserve.scheduler import PlannedRow, StepPlan
from paxserve.sharding import make_mesh
from paxserve.step import DeviceState, StepOutputs, StepSpec, prompt_logprobs, step

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 64
"""Prompt tokens whose logprobs are computed at a time: their logits fill rows x vocabulary floats."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class InFlight:
    """A step that was dispatched: its outputs may still be being computed."""

    plan: StepPlan
    bucket: Bucket
    outputs: StepOutputs
    prompt_logprobs: dict[PlannedRow, list[LogprobsBatch]]


class Runner:
    """Runs plans. Everything is compiled at construction; a compilation after that is counted and logged as an error.

    config: with model, pool and context sizes all filled in.
    """

    def __init__(
        self, source: ModelSource, config: EngineConfig, progress: Progress = lambda what, done, total: None
    ) -> None:
        model_config = source.config
        config = config.resolve(model_config)
        if config.compilation_cache_dir is not None:
            jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.compilation_cache_dir))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        self._watch = CompileWatch()
        self._model = model_class(model_config)
        self._dtype = jnp.dtype(config.dtype)
        self._model_config = model_config
        self.mesh = make_mesh(devices=jax.devices()[:1])
        self._sharding = SingleDeviceSharding(self.mesh.devices.flat[0])

        def make_model(rngs: nnx.Rngs) -> nnx.Module:
            return self._model(model_config, rngs=rngs, dtype=self._dtype, scan_layers=config.scan_layers)

        progress("loading weights", 0, 1)
        if config.load_format == "dummy":
            params = source.load_random(make_model, self.mesh, config.seed)
        else:
            params = source.load(make_model, self.mesh)
        leaves, params_tree = jax.tree.flatten(params)
        self._params = tuple(leaves)
        progress("loading weights", 1, 1)

        self.buckets = make_buckets(config.max_num_seqs, config.max_num_batched_tokens)
        graph, _ = abstract_params(make_model)
        spec = StepSpec(graph, params_tree, 0, config.page_size, config.attention)
        self.config = self._size_pool(config, spec)
        self._spec = replace(spec, num_pages=self.config.num_pages)
        self._pages_per_seq = -(-self.config.max_model_len // config.page_size)
        self._compile(progress)
        self.state = self._initial_state()
        self._sampling: dict[int, tuple[tuple, SamplingBatch]] = {}

    @property
    def weight_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self._params)

    @property
    def bytes_per_page(self) -> int:
        """KV bytes of one page over all layers."""
        shape = self._model.pages_shape(self._model_config, 1, self.config.page_size)
        return math.prod(shape) * self._dtype.itemsize

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
                self._set_history(request.slot, request.tokens(0, request.num_tokens - request.num_pending))
            inputs = pack(plan, bucket, self._pages_per_seq, padding_slot=self.config.max_num_seqs)
            sampling = self._pack_sampling(plan.rows, bucket.seqs)
            self.state, outputs = self._steps[bucket](self._params, self.state, inputs, sampling)
            prompt = {row: self._prompt_logprobs(row, plan, bucket, outputs) for row in plan.rows if _wants_prompt(row)}
        if self._watch.count > before:
            logger.error("a program was compiled after warm-up, in a step of bucket %s; this is a bug", bucket)
        return InFlight(plan, bucket, outputs, prompt)

    def _pack_sampling(self, rows: tuple[PlannedRow, ...], seqs: int) -> SamplingBatch:
        """The sampling arrays on the device, kept from the last step of this size if nothing changed."""
        key = sampling_key(rows)
        if seqs not in self._sampling or self._sampling[seqs][0] != key:
            self._sampling[seqs] = key, jax.device_put(pack_sampling(rows, seqs), self._sharding)
        return self._sampling[seqs][1]

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            pairs = np.zeros((2, self.config.max_num_seqs), np.int32)
            pairs[:, : len(copies)] = np.array(copies).T
            self.state = self._copy_program(self.state, pairs[0], pairs[1])

    def _set_history(self, slot: int, tokens: list[int]) -> None:
        row = np.zeros(self.config.max_model_len, np.int32)
        row[: len(tokens)] = tokens
        self.state = self._history_program(self.state, np.int32(slot), row)

    def _prompt_logprobs(
        self, row: PlannedRow, plan: StepPlan, bucket: Bucket, outputs: StepOutputs
    ) -> list[LogprobsBatch]:
        """Logprobs of the prompt tokens that follow the row's tokens, PROMPT_LOGPROB_ROWS at a time."""
        first = sum(other.count for other in plan.rows[: plan.rows.index(row)])
        prompt = row.request.prompt_token_ids
        targets = prompt[row.start + 1 : row.start + row.count + 1]
        batches = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = targets[start : start + PROMPT_LOGPROB_ROWS]
            arrays = np.zeros((2, PROMPT_LOGPROB_ROWS), np.int32)
            arrays[0, : len(part)] = first + start + np.arange(len(part))
            arrays[1, : len(part)] = part
            batches.append(self._prompt_programs[bucket.tokens](self._params, outputs.hidden, arrays[0], arrays[1]))
        return batches

    def _size_pool(self, config: EngineConfig, spec: StepSpec) -> EngineConfig:
        """Fill in num_pages and max_model_len; raises ValueError if the pool cannot hold one longest sequence."""
        self.config = config
        per_page = self.bytes_per_page
        model_len = self._model_config.max_position_embeddings
        max_model_len = config.max_model_len or model_len
        if max_model_len > model_len:
            raise ValueError(f"max_model_len={max_model_len}: the model's context ends at {model_len} tokens")
        num_pages = config.num_pages
        if num_pages is None:
            enough = config.max_num_seqs * -(-max_model_len // config.page_size) + 1
            num_pages = min(self._kv_bytes(config, spec, max_model_len) // per_page, enough)
        if num_pages < 2:
            raise ValueError(
                f"the KV pool would have {num_pages} pages of {per_page} bytes; it needs at least 2: "
                "give it more memory, or make pages smaller (page_size)"
            )
        pool_tokens = (num_pages - 1) * config.page_size
        if config.max_model_len is None:
            max_model_len = min(max_model_len, pool_tokens)
        elif pool_tokens < max_model_len:
            raise ValueError(
                f"the KV pool of {num_pages} pages holds {pool_tokens} tokens, less than max_model_len={max_model_len}: "
                "lower max_model_len, or raise num_pages or kv_cache_bytes"
            )
        return replace(config, num_pages=num_pages, max_model_len=max_model_len)

    def _kv_bytes(self, config: EngineConfig, spec: StepSpec, max_model_len: int) -> int:
        if config.kv_cache_bytes is not None:
            return config.kv_cache_bytes
        if jax.default_backend() == "cpu":
            return CPU_KV_CACHE_BYTES
        device = self.mesh.devices.flat[0]
        limit = int((device.memory_stats() or {})["bytes_limit"] * config.memory_fraction)
        # The largest step's needs do not depend on the pool's size: compile it over the smallest one.
        self.config = replace(config, num_pages=2, max_model_len=max_model_len)
        self._spec = replace(spec, num_pages=2)
        self._pages_per_seq = -(-max_model_len // config.page_size)
        return limit - step_bytes(self._lower_step(max(self.buckets)).compile())

    def _state_shapes(self) -> DeviceState:
        config = self.config
        pages = self._model.pages_shape(self._model_config, config.num_pages, config.page_size)
        history = (config.max_num_seqs + 1, config.max_model_len)
        return DeviceState(self._shape(pages, self._dtype), self._shape(history, jnp.int32))

    def _initial_state(self) -> DeviceState:
        return jax.tree.map(
            lambda shape: jax.device_put(jnp.zeros(shape.shape, shape.dtype), self._sharding), self._state_shapes()
        )

    def _shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    def _lower_step(self, bucket: Bucket) -> jax.stages.Lowered:
        inputs = pack(StepPlan(()), bucket, self._pages_per_seq, self.config.max_num_seqs)
        sampling = jax.tree.map(lambda a: self._shape(a.shape, a.dtype), pack_sampling((), bucket.seqs))
        jitted = jax.jit(functools.partial(step, self._spec, bucket.decode), donate_argnums=1)
        return jitted.lower(self._params, self._state_shapes(), inputs, sampling)

    def _compile(self, progress: Progress) -> None:
        """Compile every program, several at a time: XLA works outside Python's lock."""
        state, rows = self._state_shapes(), self._shape((PROMPT_LOGPROB_ROWS,), jnp.int32)
        pairs, history = self._shape((self.config.max_num_seqs,), jnp.int32), state.history
        jobs: dict[Any, Callable[[], jax.stages.Lowered]] = {
            b: functools.partial(self._lower_step, b) for b in self.buckets
        }
        prompt = jax.jit(functools.partial(prompt_logprobs, self._spec))
        for bucket in self.buckets:
            hidden = self._shape((bucket.tokens, self._model_config.hidden_size), self._dtype)
            jobs["prompt", bucket.tokens] = functools.partial(prompt.lower, self._params, hidden, rows, rows)
        copy = jax.jit(functools.partial(_copy_state_pages, num_layers=self._model_config.num_layers), donate_argnums=0)
        jobs["copy"] = functools.partial(copy.lower, state, pairs, pairs)
        set_history = jax.jit(_set_history_row, donate_argnums=0)
        row = self._shape(history.shape[1:], jnp.int32)
        jobs["history"] = functools.partial(set_history.lower, state, self._shape((), jnp.int32), row)

        programs = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for done, (name, program) in enumerate(
                zip(jobs, pool.map(lambda job: job().compile(), jobs.values()), strict=True)
            ):
                programs[name] = program
                progress("compiling", done + 1, len(jobs))
        self._steps = {bucket: programs[bucket] for bucket in self.buckets}
        self._prompt_programs = {bucket.tokens: programs["prompt", bucket.tokens] for bucket in self.buckets}
        self._copy_program, self._history_program = programs["copy"], programs["history"]


def step_bytes(program: jax.stages.Compiled) -> int:
    """Device bytes that a compiled step needs besides its outputs that alias its arguments."""
    memory = program.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )


def _wants_prompt(row: PlannedRow) -> bool:
    """Whether logprobs were asked for of prompt tokens that follow this row's; samples share those of the first one."""
    request = row.request
    wanted = request.params.prompt_logprobs is not None and request.parent is None
    return wanted and row.start < len(request.prompt_token_ids) - 1


def _copy_state_pages(state: DeviceState, src: jax.Array, dst: jax.Array, *, num_layers: int) -> DeviceState:
    return replace(state, kv_pages=copy_pages(state.kv_pages, src, dst, num_layers=num_layers))


def _set_history_row(state: DeviceState, slot: jax.Array, tokens: jax.Array) -> DeviceState:
    return replace(state, history=state.history.at[slot].set(tokens))
