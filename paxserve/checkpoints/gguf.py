"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), dequantised as they are read.

The header is read here, not by `gguf.GGUFReader`, which keeps several numpy objects for every string of the vocabulary
and takes seconds for it; the block formats are the `gguf` package's.
"""

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from paxserve.checkpoints.reader import CheckpointError, TensorInfo

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

Axis = TypeVar("Axis")  # a size or a slice

# struct formats of the scalar value types
SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
# Those that have no ".weight" or ".bias" in Hugging Face's names.
WHOLE_LAYER_NAMES = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj",
    "ffn_up_exps.weight": "mlp.experts.up_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
# llama.cpp stores the key half of kv_b_proj as [heads, latent, head_dim], so that the latent is what a product gives.
TRANSPOSED = ".self_attn.k_b_proj.weight"


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without a counterpart is returned unchanged."""
    if match := re.fullmatch(r"blk\.(\d+)\.((\w+)\.(weight|bias))", name):
        layer, whole, part, kind = match.groups()
        if whole in WHOLE_LAYER_NAMES:
            return f"model.layers.{layer}.{WHOLE_LAYER_NAMES[whole]}"
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}" if part in LAYER_NAMES else name
    part, _, kind = name.rpartition(".")
    return f"{TOP_NAMES[part]}.{kind}" if part in TOP_NAMES else name


def gguf_metadata(path: str | Path) -> dict[str, Any]:
    """The key/value pairs of a GGUF file's header as plain Python values. Raises CheckpointError if it is damaged."""
    return GgufReader(path).metadata


class GgufReader:
    """The tensors of a GGUF file by their Hugging Face names, and its `metadata`.

    llama.cpp's converter reorders the rows of q and k of the "llama" architecture so that RoPE pairs neighbours; here
    they are put back into Hugging Face's order, and so are the axes of the tensors that it transposes.

    Raises CheckpointError if the file is damaged, truncated or split, or holds a type outside SUPPORTED_TYPES.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.gguf_names: list[str] = []  # the tensors' names in the file
        self._offsets: dict[str, int] = {}
        try:
            with self.path.open("rb") as stream:
                self._file = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_header()
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be opened: {error.strerror}") from error
        except (ValueError, TypeError, LookupError, ArithmeticError, struct.error) as error:
            raise CheckpointError(f"{self.path} has a damaged or cut off GGUF header: {error}") from error

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """`tensor[index]` in float32; only the blocks that this is in are dequantised."""
        info = self.tensors[name]
        kind = GGMLQuantizationType[info.dtype]
        shape, index = _swapped(name, info.shape), _swapped(name, index)
        # Mapped anew for every use: pages stay in the process only as long as the mapping does.
        raw: np.ndarray = np.memmap(self.path, np.uint8, "r", self._offsets[name], (_stored_bytes(shape, kind),))
        order = self._row_order(name, shape[0])
        if len(shape) == 1:
            values = dequantize(raw, kind)
            return (values if order is None else values[order])[index]
        raw = raw.reshape(*shape[:-1], -1)
        rows = raw[index[:-1]] if order is None else raw[order[index[0]]]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        start, stop, _ = index[-1].indices(shape[-1])
        first, last = start // block, -(-stop // block)
        values = dequantize(rows[..., first * block_bytes : last * block_bytes], kind)
        values = values[..., start - first * block : stop - first * block]
        return values.transpose(_swapped(name, tuple(range(len(shape)))))

    def _row_order(self, name: str, rows: int) -> np.ndarray | None:
        """Where each row of q or k is in the file; None if the rows are in order."""
        part = re.search(r"\.self_attn\.([qk])_proj\.", name)
        if part is None or self.metadata["general.architecture"] != "llama":
            return None
        heads = self.metadata["llama.attention.head_count"]
        if part[1] == "k":
            heads = self.metadata.get("llama.attention.head_count_kv", heads)
        # In the file the two halves of a head alternate; Hugging Face has one after the other.
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()

    def _read_header(self) -> None:
        cursor = _Cursor(self._file)
        if self._file[:4] != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file: it starts with {self._file[:4]!r}")
        cursor.offset = 4
        version, tensor_count, metadata_count = cursor.unpack("IQQ")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path} has GGUF version {version}; supported are 2 and 3, little-endian")
        for _ in range(metadata_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(*cursor.unpack("I"))
        if self.metadata.get("split.count", 1) > 1:
            raise CheckpointError(f"{self.path} is one part of a split model; join it with `llama-gguf-split --merge`")

        declared = [cursor.tensor() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        data_start = math.ceil(cursor.offset / alignment) * alignment
        for name, shape, kind, offset in declared:
            if kind.name not in SUPPORTED_TYPES:
                raise CheckpointError(
                    f"tensor {name} in {self.path} has quantisation type {kind.name}; "
                    f"supported are {', '.join(SUPPORTED_TYPES)}"
                )
            end = data_start + offset + _stored_bytes(shape, kind)
            if end > len(self._file):
                raise CheckpointError(
                    f"tensor {name} in {self.path} is cut off: it ends at byte {end} of {len(self._file)}"
                )
            if (theirs := hf_name(name)) in self.tensors:
                raise CheckpointError(f"tensor {name} is in {self.path} twice")
            self.gguf_names.append(name)
            self.tensors[theirs] = TensorInfo(_swapped(theirs, shape), kind.name, self.path)
            self._offsets[theirs] = data_start + offset


class _Cursor:
    """Reads the header's values one after the other."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer, self.offset = buffer, 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self.buffer, self.offset)
        self.offset += struct.calcsize(f"<{layout}")
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        start, self.offset = self.offset, self.offset + length
        if self.offset > len(self.buffer):
            raise ValueError(f"a string of {length} bytes runs past the end of the file")
        return self.buffer[start : self.offset].decode()

    def value(self, type_id: int) -> Any:
        kind = GGUFValueType(type_id)
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.unpack(SCALARS[kind])[0]
        item_id, count = self.unpack("IQ")
        item = GGUFValueType(item_id)
        if item == GGUFValueType.ARRAY:
            raise ValueError("arrays of arrays are not supported")
        if item in SCALARS:
            return list(self.unpack(f"{count}{SCALARS[item]}"))
        return [self.value(item_id) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        """(name, shape with the rows first, type, offset within the data) of the next tensor."""
        name, (dims,) = self.string(), self.unpack("I")
        shape = self.unpack(f"{dims}Q")[::-1]
        kind, offset = self.unpack("IQ")
        return name, shape, GGMLQuantizationType(kind), offset


def _swapped(name: str, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """What there is for each axis of a tensor, in the file's order from Hugging Face's or the other way round."""
    return (*axes[:-2], *axes[:-3:-1]) if name.endswith(TRANSPOSED) else axes


def _stored_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f"rows of {shape[-1]} values are not whole {kind.name} blocks of {block}")
    return math.prod(shape) // block * block_bytes
