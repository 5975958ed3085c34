"""From tensors as they come out of the files to those a model computes with."""

import re
from enum import Enum
from typing import Final, Protocol

import torch
from epdserve.kernels.quant import dequantize_fp8_blocks, dequantize_mxfp4
from epdserve.model.config import ModelConfig
from epdserve.model.errors import WeightFileError
from epdserve.model.tensor_map import Storage, TensorSpec

_EXPERT: Final = re.compile(r"(layers\.\d+\.ffn\.experts)\.(\d+)\.(w[123])\.weight")
_E8M0_NAN: Final = 255
_E4M3_NAN: Final = 0x7F


class WeightForm(Enum):
    """How weights lie in memory."""

    WIDE = "wide"  # float32 values, exact
    STORED = "stored"  # the bytes of the files: a quarter of that and less


class Form(Protocol):
    """Puts one tensor, or one weight with its scales, into ``tensors``."""

    tensors: dict[str, torch.Tensor]

    def plain(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor without scales."""

    def pair(self, name: str, storage: Storage, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Codes and scales as bytes, on the device; they may be views of a mapped file."""


class Assembly:
    """Pairs weights with their scales and hands them to a form."""

    def __init__(
        self, config: ModelConfig, expected: dict[str, TensorSpec], device: torch.device, form: WeightForm
    ) -> None:
        experts = config.text.n_routed_experts
        self._form: Form = WideForm(experts) if form is WeightForm.WIDE else StoredForm(experts)
        self._expected, self._device = expected, device
        self._waiting: dict[str, torch.Tensor] = {}  # one half of a pair whose other half is in a later shard

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is ready."""
        return self._form.tensors

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take the next tensor of the files."""
        spec = self._expected[name]
        if spec.storage is Storage.PLAIN:
            # Copied: a view would crash the process if somebody cut the mapped file short later.
            self._form.plain(name, _finite(name, tensor.to(self._device, copy=True)))
            return
        weight_name = spec.scale_of or name
        other = self._waiting.pop(weight_name, None)
        if other is None:
            self._waiting[weight_name] = tensor
        elif spec.storage is Storage.SCALE:
            self._add_pair(weight_name, other, tensor)
        else:
            self._add_pair(weight_name, tensor, other)

    def _add_pair(self, name: str, weight: torch.Tensor, scale: torch.Tensor) -> None:
        weight, scale = (part.view(torch.uint8).to(self._device) for part in (weight, scale))
        if bool((scale == _E8M0_NAN).any()):
            raise WeightFileError(f"{name}: a scale is NaN")
        self._form.pair(name, self._expected[name].storage, weight, scale)


class WideForm:
    """Exact float32 values; Engram tables stay as they are stored, routed experts are stacked by matrix."""

    def __init__(self, experts: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._experts = experts

    def plain(self, name: str, tensor: torch.Tensor) -> None:
        """See Form."""
        self.tensors[name] = tensor.float()

    def pair(self, name: str, storage: Storage, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """See Form."""
        if storage is Storage.TABLE:
            self.tensors[name] = weight.clone()
            self.tensors[name.removesuffix("weight") + "scale"] = scale.clone()
        elif storage is Storage.FP8:
            self.tensors[name] = _finite(name, dequantize_fp8_blocks(weight, scale))
        else:
            experts, index, matrix = _expert(name)
            value = dequantize_mxfp4(weight, scale)
            stack = self.tensors.get(f"{experts}.{matrix}")
            if stack is None:
                stack = self.tensors[f"{experts}.{matrix}"] = value.new_empty(self._experts, *value.shape)
            stack[index] = value


class StoredForm:
    """Codes and scales as bytes. Routed experts are stacked: ``w13`` (gate over up) and ``w2``, with their scales."""

    def __init__(self, experts: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._experts = experts

    def plain(self, name: str, tensor: torch.Tensor) -> None:
        """See Form."""
        self.tensors[name] = tensor

    def pair(self, name: str, storage: Storage, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """See Form."""
        if storage is Storage.MXFP4:
            experts, index, matrix = _expert(name)
            for part, suffix in ((weight, ""), (scale, "_scale")):
                self._stack(experts, matrix, suffix, part)[index] = part
            return
        if bool(((weight & _E4M3_NAN) == _E4M3_NAN).any()):
            raise WeightFileError(f"{name}: a value is not finite")
        self.tensors[name] = weight.clone()
        self.tensors[name.removesuffix("weight") + "scale"] = scale.clone()

    def _stack(self, experts: str, matrix: str, suffix: str, part: torch.Tensor) -> torch.Tensor:
        """(E, rows, columns) of one matrix; w1 and w3 are halves of w13."""
        name = f"{experts}.{'w2' if matrix == 'w2' else 'w13'}{suffix}"
        rows, columns = part.shape
        if name not in self.tensors:
            height = rows if matrix == "w2" else 2 * rows
            self.tensors[name] = part.new_empty(self._experts, height, columns)
        stack = self.tensors[name]
        return stack if matrix == "w2" else stack[:, :rows] if matrix == "w1" else stack[:, rows:]


def _expert(name: str) -> tuple[str, int, str]:
    """Prefix, number and matrix of a routed expert's weight."""
    match = _EXPERT.fullmatch(name)
    assert match is not None, f"{name} is stored as FP4 and belongs to no expert"
    return match[1], int(match[2]), match[3]


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise WeightFileError(f"{name}: a value is not finite")
    return tensor
