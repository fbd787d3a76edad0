"""Which `quantization_config` of a config.json is read, and what can be kept of it: the FP8 blocks of DeepSeek-V3."""

from collections.abc import Mapping
from typing import Any

from paxserve.models.config import ModelConfig

_VALUES: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    # Activations are not quantised at all here, which is what the scheme approximates.
    "activation_scheme": "dynamic",
}
_OPTIONAL = {"fmt"}
# Names of the modules left in 16 bit, which the checkpoint shows by itself.
_UNREAD = {"modules_to_not_convert", "ignored_layers"}


def read_quantization(quantization: Mapping[str, Any] | None) -> str | None:
    """The name "fp8", or None where there is no quantisation.

    Raises NotImplementedError, naming the field, for any other format than FP8 in blocks of 128 x 128.
    """
    if quantization is None:
        return None
    for field, value in quantization.items():
        if field not in _UNREAD and (field not in _VALUES or value != _VALUES[field]):
            raise NotImplementedError(
                f"quantization_config with {field}={value!r} is not supported, only FP8 in blocks of 128 x 128"
            )
    if missing := _VALUES.keys() - _OPTIONAL - quantization.keys():
        raise NotImplementedError(f"quantization_config without {', '.join(sorted(missing))} is not supported")
    return "fp8"


def check_quantization(quantization: str | None, config: ModelConfig) -> None:
    """Raises ValueError if weights are to be kept in a form that the checkpoint does not have them in."""
    if quantization not in (None, config.quantization):
        raise ValueError(
            f"quantization={quantization!r}: the checkpoint's weights are not in FP8 with scales for blocks of 128 x 128; "
            "leave the option out"
        )
