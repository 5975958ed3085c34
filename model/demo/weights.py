"""Random weights of the demo model, in the storage formats of the published checkpoint.

Every tensor draws from a generator seeded by (seed, tensor name), so a changed shape moves no other tensor.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from epdserve.kernels.quant import quantize_fp8, quantize_fp8_blocks, quantize_mxfp4
from epdserve.model.config import ModelConfig
from epdserve.model.demo.preset import SCALES, InitialScales
from epdserve.model.tensor_map import Storage, TensorSpec, expected_tensors
from epdserve.model.vision.tensors import vision_tensors

_Numbers = npt.NDArray[np.float64]
_Draw = Callable[[np.random.Generator, tuple[int, ...]], _Numbers]


def demo_tensors(
    config: ModelConfig, *, seed: int, silent_ids: Sequence[int], ending_ids: Sequence[int]
) -> dict[str, torch.Tensor]:
    """All tensors a checkpoint of this config holds, as stored.

    Args:
        config: Shapes.
        seed: Of all draws.
        silent_ids: Tokens that greedy decoding should never choose: markers and what is no text alone.
        ending_ids: Tokens whose rows are louder, so that thinking and answers end.
    """
    specs, tensors = expected_tensors(config), image_tensors(config, seed=seed)
    for name, value in _draw_all(config, specs, seed):
        if name == "head.weight":
            value[list(silent_ids)] = 0.0
            value[list(ending_ids)] *= SCALES.ending_gain
        tensors.update(store_tensor(name, specs[name], value))
    return tensors


def image_tensors(config: ModelConfig, *, seed: int) -> dict[str, torch.Tensor]:
    """Those of them that only images need: random beside trained weights too."""
    if config.vision is None:
        return {}
    specs, tensors = vision_tensors(config), dict[str, torch.Tensor]()
    for name, value in _draw_all(config, specs, seed):
        tensors.update(store_tensor(name, specs[name], value))
    return tensors


def _draw_all(
    config: ModelConfig, specs: Mapping[str, TensorSpec], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, float32 values) of all but the scales, which come with their weights."""
    rules = _Rules(config, SCALES)
    for name, spec in specs.items():
        if spec.storage is not Storage.SCALE:
            generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
            numbers = rules.draw(name, generator, _numbers_shape(spec)).astype(np.float32)
            yield name, torch.from_numpy(numbers)


def _numbers_shape(spec: TensorSpec) -> tuple[int, ...]:
    if spec.storage is Storage.MXFP4:
        return spec.shape[0], 2 * spec.shape[1]
    return spec.shape


def store_tensor(name: str, spec: TensorSpec, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """``value`` as a checkpoint stores it: the tensor, and its scales where it has some."""
    if spec.storage is Storage.PLAIN:
        return {name: value if spec.dtypes == {"F32"} else value.to(torch.bfloat16)}
    if spec.storage is Storage.MXFP4:
        codes, scales = quantize_mxfp4(value)
        stored = codes.view(torch.int8)
    else:
        codes, scales = quantize_fp8(value) if spec.storage is Storage.TABLE else quantize_fp8_blocks(value)
        stored = codes.view(torch.float8_e4m3fn)
    return {name: stored, name.removesuffix("weight") + "scale": scales.view(torch.float8_e8m0fnu)}


class _Rules:
    """Name pattern -> how to draw. The first match counts; other matrices get 1 / sqrt(fan-in)."""

    def __init__(self, config: ModelConfig, scales: InitialScales) -> None:
        text = config.text
        self._copies = text.hc_mult
        self._scales = scales
        # Two sub-blocks a layer add to the streams; damped, their sum stays of the size of the embedding.
        self._damping = 1 / math.sqrt(2 * text.num_hidden_layers)
        self._rules: Final[list[tuple[str, _Draw]]] = [
            (r"embed\.weight", _normal(scales.embedding)),
            (r".*engram\.embed\.weight", _normal(scales.engram_rows)),
            (r"head\.weight", _normal(scales.logits / math.sqrt(text.hidden_size))),
            (r"image_(start|newline|end)", _normal(scales.embedding)),
            (r"aligner\.w2\.weight", _fan_in),  # embeddings are as large as those of tokens
            (r".*norm[12]?\.weight|.*engram\.[qk]_weight", _normal(scales.gain_spread, mean=1.0)),
            (r".*attn_sink", _normal(scales.sink)),
            (r".*gate\.bias(_vl)?", _normal(scales.router_bias)),
            (r".*hc_\w+_scale", _constant(scales.hyper_scale)),
            (r".*hc_(attn|ffn)_base", self._hyper_base),
            (r".*(wo_b|w2)\.weight", self._damped),
        ]

    def draw(self, name: str, generator: np.random.Generator, shape: tuple[int, ...]) -> _Numbers:
        for pattern, rule in self._rules:
            if re.fullmatch(pattern, name):
                return rule(generator, shape)
        return _fan_in(generator, shape)

    def _damped(self, generator: np.random.Generator, shape: tuple[int, ...]) -> _Numbers:
        return _fan_in(generator, shape) * self._damping

    def _hyper_base(self, generator: np.random.Generator, shape: tuple[int, ...]) -> _Numbers:
        """Read mostly one copy (drawn), write all equally, keep each copy mostly to itself."""
        copies, pull = self._copies, self._scales.hyper_pull
        base = np.full(shape, -pull)
        base[generator.integers(copies)] = pull
        base[copies : 2 * copies] = 0.0
        base[2 * copies :] += 2 * pull * np.eye(copies).flatten()
        return base


def _normal(spread: float, *, mean: float = 0.0) -> _Draw:
    return lambda generator, shape: mean + spread * generator.standard_normal(shape)


def _constant(value: float) -> _Draw:
    return lambda generator, shape: np.full(shape, value)


def _fan_in(generator: np.random.Generator, shape: tuple[int, ...]) -> _Numbers:
    return generator.standard_normal(shape) / math.sqrt(shape[-1])
