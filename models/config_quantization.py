"""Which `quantization_config` of a config.json is read: the FP8 blocks of DeepSeek-V3."""

from collections.abc import Mapping
from typing import Any

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


def check_quantization(quantization: Mapping[str, Any]) -> None:
    """Raises NotImplementedError, naming the field, for any other format than FP8 in blocks of 128 x 128."""
    for field, value in quantization.items():
        if field not in _UNREAD and (field not in _VALUES or value != _VALUES[field]):
            raise NotImplementedError(
                f"quantization_config with {field}={value!r} is not supported, only FP8 in blocks of 128 x 128"
            )
    if missing := _VALUES.keys() - _OPTIONAL - quantization.keys():
        raise NotImplementedError(f"quantization_config without {', '.join(sorted(missing))} is not supported")
