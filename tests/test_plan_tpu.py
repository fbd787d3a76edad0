"""The step compiled for TPUs that are not there: it communicates what the model says and nothing else, and copies neither
pages nor kernels.

Needs libtpu, with which `scripts/check_kernels` runs these tests.
"""

import importlib.util
import math
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from step_costs import loops

from paxserve.buckets import Bucket
from paxserve.chips import describe
from paxserve.config import EngineConfig
from paxserve.hlo import collectives
from paxserve.models.builtin import builtin_config
from paxserve.models.config_hf import config_from_hf
from paxserve.runner import make_builder
from paxserve.sampling_params import MAX_LOGPROBS
from paxserve.sharding import shape_of
from paxserve.sizing import size_limits

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

SEQS = 16  # in a data group's decode step, each with one token
PAGES = 2048  # enough for a copy of one layer's pages to stand out
BF16, F32, INT32 = 2, 4, 4

SHAPE = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "vocab_size": 4096}
LLAMA = SHAPE | {"num_key_value_heads": 8, "head_dim": 128}
EXPERTS = {
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}
DEEPSEEK = SHAPE | EXPERTS | {"num_key_value_heads": 16, "q_lora_rank": 256, "first_k_dense_replace": 1}
CASES = {
    "llama on v5e:2x2": ("llama-3.1-8b", LLAMA, None, (2, 4)),
    "llama on v6e:4x4": ("llama-3.1-8b", LLAMA, "kv_head=8,kv_page=2", (2, 4)),
    "deepseek on v6e:4x4": ("deepseek-v3", DEEPSEEK, "data=2,kv_page=8", (3, 5)),
}


class Program:
    """A model's decode step, compiled for the devices of a topology as `paxserve plan` compiles it."""

    def __init__(self, name, fields, mesh, topology):
        self.model = config_from_hf(builtin_config(name) | fields)
        sizes = {"max_model_len": 1024, "max_num_seqs": SEQS, "max_num_batched_tokens": 64, "num_pages": PAGES}
        config = EngineConfig(model=name, mesh=mesh, compilation_cache_dir=None, **sizes)
        topology = describe(topology)
        builder = make_builder(self.model, config, topology.devices)
        self.mesh, memory = shape_of(builder.mesh), topology.chip.memory_bytes
        limits = size_limits(config, self.model, builder.kv_dtype.name, self.mesh, memory, builder.step_bytes)
        pages = builder.state_shapes(limits).kv_pages
        pages_bytes = math.prod(pages.sharding.shard_shape(pages.shape)) * pages.dtype.itemsize
        self.layer_bytes = pages_bytes // self.model.num_layers
        shards = [param.sharding.shard_shape(param.shape) for param in builder.params]
        self.stacks = {shape for shape in shards if len(shape) > 2}  # kernels of a run of layers
        compiled = builder.lower_step(Bucket(SEQS, SEQS, decode=True), limits).compile()
        self.text, self.temporaries = compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module", params=CASES)
def programs(request, optimized):
    """One case in two depths."""
    name, fields, mesh, depths = CASES[request.param]
    topology = request.param.split()[-1]
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(lambda depth: Program(name, fields | {"num_hidden_layers": depth}, mesh, topology), depths)
        )


def communicated(text):
    """Bytes by (what is done, devices that do it together). What is summed counts whole, also where each keeps a part."""
    found = Counter()
    for each, times in collectives(text).items():
        what = {"all-reduce": "sum", "reduce-scatter": "sum", "all-gather": "gather", "all-to-all": "exchange"}[
            each.kind
        ]
        found[what, each.group] += times * each.bytes * (each.group if each.kind == "reduce-scatter" else 1)
    return found


def of_model(model, mesh):
    """What the model's code communicates in a decode step, in the same terms."""
    x = SEQS * model.hidden_size * BF16
    found = Counter({("sum", mesh.tensor): x})  # embeddings, of a split vocabulary
    for is_moe in model.moe.layers if model.moe else [False] * model.num_layers:
        heads, dim, mla = model.num_heads // mesh.kv_head, model.head_dim, model.mla
        if mesh.kv_page > 1:
            if mla:  # queries of all heads, ready to meet the latents
                found["gather", mesh.kv_page] += SEQS * heads * mla.cached_dim * BF16
                dim = mla.kv_lora_rank
            else:  # q, k and v, which are split by the width of the heads
                kv_heads = model.num_kv_heads // mesh.kv_head
                found["gather", mesh.kv_page] += SEQS * (heads + 2 * kv_heads) * dim * BF16
            found["gather", mesh.kv_page] += mesh.kv_page * SEQS * heads * F32  # log-sum-exps
            found["sum", mesh.kv_page] += SEQS * heads * dim * BF16  # weighted outputs
        found["sum", mesh.tensor] += x  # output projection
        found["sum", mesh.tensor] += x  # MLP, or shared experts
        if is_moe:
            choices = SEQS * model.moe.experts_per_token * (INT32 + F32)  # experts and their weights
            found["gather", mesh.data] += mesh.data * (x + choices)
            found["sum", mesh.data] += mesh.data * x
            found["sum", mesh.tensor] += x
    found["exchange", mesh.tensor] += SEQS // mesh.tensor * model.vocab_size * F32  # logits of a device's sequences
    return found


ARRAY = r"\w+\[([\d,]+)\]"
CALLED = r"calls=%([\w.\-]+)"


def readers(text, stacks):
    """(instruction, whether it writes as much as a layer's kernel without a product) for all that read a stack of kernels.

    Whole stacks that are small are fetched ahead (copy-start), which is none of these.
    """
    bodies = dict(re.findall(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{\n((?:.+\n)*?)\}", text, re.MULTILINE))
    fused = set(re.findall(CALLED, text))
    lines = [line for name, body in bodies.items() if name not in fused for line in body.splitlines()]
    arrays = (re.match(rf"\s+(?:ROOT )?%([\w.\-]+) = {ARRAY}", line) for line in lines)
    shapes = {match[1]: tuple(map(int, match[2].split(","))) for match in arrays if match}
    for line in lines:
        match = re.search(r" = (.*?) (?:fusion|copy|slice|dynamic-slice|reshape|transpose)\((.*?)\)", line)
        operands = [shapes.get(name) for name in re.findall(r"%([\w.\-]+)", match[2])] if match else []
        if read := stacks.intersection(operands):
            is_product = any(re.search(r" (?:convolution|dot)\(", bodies[name]) for name in re.findall(CALLED, line))
            written = sum(math.prod(map(int, sizes.split(","))) for sizes in re.findall(ARRAY, match[1]))
            yield line, not is_product and written >= min(math.prod(shape[1:]) for shape in read)


def test_communicates_what_the_model_says(programs):
    """What remains is that everybody is told each sequence's token, its logprob and rank, and the likeliest tokens."""
    drawn = SEQS * (INT32 + F32 + INT32 + MAX_LOGPROBS * (INT32 + F32))
    for program in programs:
        mesh, rest = program.mesh, communicated(program.text)
        rest.subtract(of_model(program.model, mesh))
        assert min(rest.values()) >= 0, rest
        told = Counter()  # the compiler makes sums of some of these gathers
        for (_, group), size in rest.items():
            told[group] += size
        told = +told
        # Of 16 devices four gather from one another, and then fours from fours.
        expected = Counter({4: drawn // 4 + drawn} if mesh.tensor == 16 else {mesh.tensor: drawn})
        assert told == expected + Counter({mesh.data: mesh.data * drawn} if mesh.data > 1 else {})


def test_does_not_grow_with_depth(programs):
    """Instructions, on which the time that compiling takes depends."""
    shallow, deep = (program.text.count(" = ") for program in programs)
    assert deep == pytest.approx(shallow, rel=0.01)


def test_layers_share_the_schedule(programs):
    """Sequences are sorted by their contexts once, not in every layer's attention. (The layers are a loop.)"""
    for program in programs:
        sorts = [line for line in program.text.split("\n") if re.search(r"\bsort\(", line)]
        assert any("/schedule/" in line for line in sorts)
        assert not any("/attention/" in line for line in sorts)


def test_latent_queries_and_outputs_stay_where_they_are(programs):
    """The kernel finds each sequence's rows: nothing around it moves all heads' 512 or 576 numbers."""
    for program in programs:
        if program.model.mla is None:
            continue
        around = [line for line in program.text.split("\n") if "/paged_attention/" in line]
        assert any("mla_paged_attention_" in line for line in around)
        moved = re.compile(rf"%(gather|scatter|pad|slice)[\w.]* = \w+\[{SEQS},{program.model.num_heads},5\d\d\]")
        assert not [line for line in around if moved.search(line)]


def test_what_the_compiler_expects_of_operations(programs):
    """As scripts/step_cost shows it: products cost something, and kernels are among what it knows nothing of."""
    for program in programs:
        layer, *_ = loops(program.text).values()
        products = [each for each in layer if each.scope.endswith("dot_general")]
        assert products
        assert all(each.cycles and each.cycles > 1000 for each in products)
        assert any("paged_attention_" in each.name and each.cycles is None for each in layer)


def test_has_no_code_for_sparse_cores(programs):
    """For which libtpu crashes when it compiles two programs at a time; see programs.py."""
    for program in programs:
        assert "sparsecore" not in program.text


def test_copies_no_kernel(programs):
    for program in programs:
        found = dict(readers(program.text, program.stacks))
        assert found
        assert not [line for line, copied in found.items() if copied]


def test_copies_and_sends_no_pages(programs):
    for program in programs:
        assert program.temporaries < program.layer_bytes / 2
        assert max(each.bytes for each in collectives(program.text)) < program.layer_bytes / 16
