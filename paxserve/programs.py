"""Everything that is compiled, from shapes alone: no weights and no device memory are needed."""

import functools
import math
import os
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxserve.buckets import Bucket, make_buckets
from paxserve.limits import Limits
from paxserve.models.config import ModelConfig
from paxserve.models.kv_shape import kv_shape
from paxserve.models.params import sharded_shapes
from paxserve.models.registry import model_class
from paxserve.pack import pack, pack_sampling
from paxserve.pallas_kernels import storage_dtype
from paxserve.scheduler import StepPlan
from paxserve.sharding import shape_of, to_spec
from paxserve.step import (
    EVERYWHERE,
    GROUP,
    GROUP_AND_PAGES,
    INPUTS,
    DeviceState,
    StepSpec,
    copy_in_groups,
    prompt_logprobs,
    step,
)

PROMPT_LOGPROB_ROWS = 64
"""Prompt tokens whose logprobs are computed at a time: their logits fill rows x vocabulary floats."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Programs:
    """The compiled programs of an engine.

    steps: by bucket.
    take_rows: by the tokens of a step, PROMPT_LOGPROB_ROWS rows of its hidden states for `prompt_logprobs`.
    """

    steps: dict[Bucket, jax.stages.Compiled]
    take_rows: dict[int, jax.stages.Compiled]
    prompt_logprobs: jax.stages.Compiled
    copy_pages: jax.stages.Compiled
    set_history: jax.stages.Compiled


COMPILER_OPTIONS = {"tpu": {"xla_tpu_enable_offloading_scatter_to_sparsecore": False}}
"""By platform. libtpu 0.0.42 crashes now and then if two programs that have code for sparse cores are compiled at a time; ours
would have it for small scatters alone, of sampling, routing and bookkeeping."""


class ProgramBuilder:
    """Lowers and compiles the programs of one model on one mesh."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        dtype: str,
        kv_dtype: str,
        quantization: str | None = None,
        scan_layers: bool,
        page_size: int,
        attention: str,
    ) -> None:
        self.model, self.mesh, self.dtype = model, mesh, jnp.dtype(dtype)
        self.kv_dtype = jnp.dtype(kv_dtype)
        self.scan_layers, self.attention = scan_layers, attention
        self._family = family = model_class(model)
        shape = shape_of(mesh)
        declared = family(model, dtype=self.dtype, scan_layers=scan_layers, quantization=quantization, mesh=shape)
        graph, self.declared = nnx.split(declared)
        leaves, tree = jax.tree.flatten(sharded_shapes(self.declared, mesh))
        self.params = tuple(leaves)
        placed = tuple(leaf.sharding.spec for leaf in leaves)
        pages = to_spec(family.pages_axes, (), shape)
        self._jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS.get(mesh.devices.flat[0].platform))
        self._spec = StepSpec(graph, tree, mesh, placed, pages, 0, page_size, attention)

    def placed(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def state_shapes(self, limits: Limits) -> DeviceState:
        platform = self.mesh.devices.flat[0].platform
        rows, *page = self._family.pages_shape(self.model, limits.num_pages, limits.page_size, platform)
        values = limits.num_pages * limits.page_size * kv_shape(self.model).values_per_token
        assert math.prod([rows, *page]) == values, f"{rows} pages of {page} do not hold {values} values, as they should"
        pages = (rows * limits.mesh.data * limits.mesh.kv_page, *page)
        history = (limits.mesh.data, limits.max_num_seqs + 1, limits.max_model_len)
        shapes: Any = (
            self._shape(pages, storage_dtype(self.kv_dtype, platform), self._spec.pages),
            self._shape(history, jnp.int32, GROUP),
        )
        return DeviceState(*shapes)

    def init_state(self, limits: Limits) -> DeviceState:
        """Zeros, made where they are to lie."""
        shapes = self.state_shapes(limits)
        placed = jax.tree.map(lambda shape: shape.sharding, shapes)
        zeros = jax.jit(
            lambda: jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes), out_shardings=placed
        )
        return zeros()

    def lower_step(self, bucket: Bucket, limits: Limits) -> jax.stages.Lowered:
        spec = replace(self._spec, num_pages=limits.num_pages)
        nothing = [StepPlan(())] * limits.mesh.data
        inputs = jax.tree.map(self._like, pack(nothing, bucket, limits), INPUTS)
        sampling = jax.tree.map(lambda array: self._like(array, GROUP), pack_sampling(nothing, bucket.seqs))
        jitted = self._jit(functools.partial(step, spec, bucket.decode), donate_argnums=1)
        return jitted.lower(self.params, self.state_shapes(limits), inputs, sampling)

    def step_bytes(self, limits: Limits) -> int:
        """Bytes that the largest step needs of each device, by the compiler's own account."""
        bucket = max(make_buckets(limits.max_num_seqs, limits.max_num_batched_tokens))
        memory: Any = self.lower_step(bucket, limits).compile().memory_analysis()
        return (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.generated_code_size_in_bytes
        )

    def compile(self, limits: Limits, progress: Progress) -> Programs:
        """Compile everything, several programs at a time: XLA works outside Python's lock."""
        buckets = make_buckets(limits.max_num_seqs, limits.max_num_batched_tokens)
        state, rows = self.state_shapes(limits), self._shape((PROMPT_LOGPROB_ROWS,), jnp.int32)
        number, mesh = self._shape((), jnp.int32), limits.mesh
        jobs: dict[Hashable, Callable[[], jax.stages.Lowered]] = {}
        for bucket in sorted(buckets, reverse=True):  # the longest compilations first
            jobs[bucket] = functools.partial(self.lower_step, bucket, limits)
        prompt = self._jit(functools.partial(prompt_logprobs, self._spec))
        taken = self._shape((PROMPT_LOGPROB_ROWS, self.model.hidden_size), self.dtype)
        jobs["prompt_logprobs"] = functools.partial(prompt.lower, self.params, taken, rows)
        take = self._jit(_take_rows, out_shardings=self.placed(EVERYWHERE))
        for tokens in {bucket.tokens for bucket in buckets}:
            hidden = self._shape((mesh.data, tokens, self.model.hidden_size), self.dtype, GROUP)
            jobs[tokens] = functools.partial(take.lower, hidden, number, rows)
        copy = self._jit(functools.partial(copy_in_groups, self._spec, self.model.num_layers), donate_argnums=0)
        pairs = self._shape((mesh.data, mesh.kv_page, limits.max_num_seqs), jnp.int32, GROUP_AND_PAGES)
        jobs["copy_pages"] = functools.partial(copy.lower, state, pairs, pairs)
        placed = jax.tree.map(lambda shape: shape.sharding, state)
        set_history = self._jit(_set_history, donate_argnums=0, out_shardings=placed)
        row = self._shape((limits.max_model_len,), jnp.int32)
        jobs["set_history"] = functools.partial(set_history.lower, state, number, number, row)

        programs = {}
        progress("compiling", 0, len(jobs))
        pool = ThreadPoolExecutor(os.cpu_count())
        try:
            compiled = pool.map(lambda lower: lower().compile(), jobs.values())
            for name, program in zip(jobs, compiled, strict=True):
                programs[name] = program
                progress("compiling", len(programs), len(jobs))
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt waits for the programs being compiled, not for all
        return Programs(
            steps={bucket: programs[bucket] for bucket in buckets},
            take_rows={bucket.tokens: programs[bucket.tokens] for bucket in buckets},
            prompt_logprobs=programs["prompt_logprobs"],
            copy_pages=programs["copy_pages"],
            set_history=programs["set_history"],
        )

    def _shape(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = EVERYWHERE) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.placed(spec))

    def _like(self, array: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return self._shape(array.shape, array.dtype, spec)


def _take_rows(hidden: jax.Array, group: jax.Array, indices: jax.Array) -> jax.Array:
    return hidden[group, indices]


def _set_history(state: DeviceState, group: jax.Array, slot: jax.Array, tokens: jax.Array) -> DeviceState:
    return replace(state, history=state.history.at[group, slot].set(tokens))
