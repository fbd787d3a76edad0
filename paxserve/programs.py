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
from paxserve.config import Limits
from paxserve.models.config import ModelConfig
from paxserve.models.kv_shape import kv_shape
from paxserve.models.params import sharded_shapes
from paxserve.models.registry import model_class
from paxserve.pack import pack, pack_sampling
from paxserve.pallas_kernels import copy_pages, storage_dtype
from paxserve.scheduler import StepPlan
from paxserve.step import DeviceState, StepSpec, prompt_logprobs, step

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


class ProgramBuilder:
    """Lowers and compiles the programs of one model on one mesh."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        dtype: str,
        quantization: str | None = None,
        scan_layers: bool,
        page_size: int,
        attention: str,
    ) -> None:
        self.model, self.mesh, self.dtype = model, mesh, jnp.dtype(dtype)
        self.scan_layers, self.attention = scan_layers, attention
        declared = model_class(model)(model, dtype=self.dtype, scan_layers=scan_layers, quantization=quantization)
        graph, self.declared = nnx.split(declared)
        leaves, tree = jax.tree.flatten(sharded_shapes(self.declared, mesh))
        self.params = tuple(leaves)
        self._spec = StepSpec(graph, tree, 0, page_size, attention)
        self.replicated = NamedSharding(mesh, PartitionSpec())

    def state_shapes(self, limits: Limits) -> DeviceState:
        platform = self.mesh.devices.flat[0].platform
        pages = model_class(self.model).pages_shape(self.model, limits.num_pages, limits.page_size, platform)
        values = limits.num_pages * limits.page_size * kv_shape(self.model).values_per_token
        assert math.prod(pages) == values, f"pages {pages} do not hold the {values} values that the pool was sized for"
        history = (limits.max_num_seqs + 1, limits.max_model_len)
        shapes: Any = self._shape(pages, storage_dtype(self.dtype, platform)), self._shape(history, jnp.int32)
        return DeviceState(*shapes)

    def lower_step(self, bucket: Bucket, limits: Limits) -> jax.stages.Lowered:
        spec = replace(self._spec, num_pages=limits.num_pages)
        arrays = pack(StepPlan(()), bucket, limits.pages_per_seq, padding_slot=0), pack_sampling((), bucket.seqs)
        inputs, sampling = jax.tree.map(lambda array: self._shape(array.shape, array.dtype), arrays)
        jitted = jax.jit(functools.partial(step, spec, bucket.decode), donate_argnums=1)
        return jitted.lower(self.params, self.state_shapes(limits), inputs, sampling)

    def step_bytes(self, limits: Limits) -> int:
        """Device bytes that the largest step needs, by the compiler's own account."""
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
        jobs: dict[Hashable, Callable[[], jax.stages.Lowered]] = {}
        for bucket in sorted(buckets, reverse=True):  # the longest compilations first
            jobs[bucket] = functools.partial(self.lower_step, bucket, limits)
        prompt = jax.jit(functools.partial(prompt_logprobs, self._spec))
        taken = self._shape((PROMPT_LOGPROB_ROWS, self.model.hidden_size), self.dtype)
        jobs["prompt_logprobs"] = functools.partial(prompt.lower, self.params, taken, rows)
        for tokens in {bucket.tokens for bucket in buckets}:
            hidden = self._shape((tokens, self.model.hidden_size), self.dtype)
            jobs[tokens] = functools.partial(jax.jit(_take_rows).lower, hidden, rows)
        copy = jax.jit(functools.partial(_copy_pages, num_layers=self.model.num_layers), donate_argnums=0)
        pairs = self._shape((limits.max_num_seqs,), jnp.int32)
        jobs["copy_pages"] = functools.partial(copy.lower, state, pairs, pairs)
        set_history = jax.jit(_set_history, donate_argnums=0)
        slot, row = self._shape((), jnp.int32), self._shape((limits.max_model_len,), jnp.int32)
        jobs["set_history"] = functools.partial(set_history.lower, state, slot, row)

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

    def _shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)


def _take_rows(hidden: jax.Array, indices: jax.Array) -> jax.Array:
    return hidden[indices]


def _copy_pages(state: DeviceState, src: jax.Array, dst: jax.Array, *, num_layers: int) -> DeviceState:
    return replace(state, kv_pages=copy_pages(state.kv_pages, src, dst, num_layers=num_layers))


def _set_history(state: DeviceState, slot: jax.Array, tokens: jax.Array) -> DeviceState:
    return replace(state, history=state.history.at[slot].set(tokens))
