"""Run by test_checkpoints_orbax.py: loads a model on a mesh of 8 devices and checks what each of them got."""

import math
import sys
from collections import Counter

import jax
import numpy as np
from flax import nnx
from tiny_checkpoints import unrolled

from paxserve.checkpoints.load import load_params
from paxserve.checkpoints.safetensors import SafetensorsReader
from paxserve.model_source import resolve_model
from paxserve.models.registry import model_class
from paxserve.models.weights import tensor_sources
from paxserve.sharding import MeshShape, make_mesh

# How many ways each parameter is split when tp = 8 = 4 KV heads x 2.
SPLITS = {
    "embedding": 8,
    "qkv": 8,
    "out": 8,
    "gate_up": 8,
    "down": 8,
    "lm_head": 8,
    "attn_norm": 1,
    "mlp_norm": 1,
    "final_norm": 1,
    "router": 1,
    "score_bias": 1,
}
# Latent attention splits its query heads all the way, and no rank.
LATENT_SPLITS = SPLITS | {"q": 8, "k_b": 8, "v_b": 8, "out": 8, "q_a": 1, "q_a_norm": 1, "kv_a": 1, "kv_a_norm": 1}


class CountingReader(SafetensorsReader):
    """Counts the values that are read of every tensor."""

    def __init__(self, directory):
        super().__init__(directory)
        self.values_read = Counter()

    def read(self, name, index):
        values = super().read(name, index)
        self.values_read[name] += values.size
        return values


def check_shards(params, split_ways):
    for path, param in nnx.to_flat_state(params):
        splits = next(count for part, count in split_ways.items() if part in path)
        shards = param.get_value().addressable_shards
        assert len(shards) == 8
        for shard in shards:
            assert shard.data.size * splits == param.size, (path, shard.data.shape, param.shape)


def main():
    hf, orbax, target = sys.argv[1:]
    assert len(jax.devices()) == 8
    mesh = make_mesh(MeshShape(kv_head=4, kv_page=2))
    config = resolve_model(hf).config
    values = {}
    for scan_layers in (False, True):
        model = nnx.state(model_class(config)(config, dtype=config.dtype, scan_layers=scan_layers))
        reader = CountingReader(hf)
        loaded = {"hf": load_params(reader, config, model, mesh), "orbax": resolve_model(orbax).load(model, mesh)}
        # Of every tensor each value is read once.
        names = {source.name for source in tensor_sources(config)}
        assert reader.values_read == {name: math.prod(reader.tensors[name].shape) for name in names}
        for kind, params in loaded.items():
            check_shards(params, SPLITS if config.mla is None else LATENT_SPLITS)
            values |= {f"{kind}{scan_layers}:{k}": v.astype(np.float32) for k, v in unrolled(params).items()}
    np.savez(target, **values)


if __name__ == "__main__":
    main()
