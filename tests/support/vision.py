"""Images, a small vision encoder, and an independent reference of it: loops over plain numbers, from spec/modules 3."""

import hashlib
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from epdserve.model.batch import ImageSpan
from epdserve.model.config import ModelConfig, VisionConfig
from epdserve.model.logits import LogitsPlan, LogitsRun
from epdserve.model.vision.encoder import PatchedImage, VisionEncoder
from epdserve.model.vision.geometry import fit_image
from epdserve.model.vision.pixels import ImageLimits, read_pixels
from epdserve.model.vision.tensors import vision_tensors
from PIL import Image
from support.golden import tiny
from support.tiny_checkpoint import TINY, tiny_tensors, write_shards

Numbers = npt.NDArray[np.float64]

SMALL = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "patch_size": 4,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 400,
}
RELEASED = VisionConfig.model_validate(
    SMALL | {"patch_size": 14, "max_image_tokens": 1024, "min_pixels": 295936}
)


def small_config() -> ModelConfig:
    """The tiny language model with a small vision encoder before it."""
    document = json.loads((TINY / "config.json").read_bytes())
    return ModelConfig.from_json(document | {"vision_config": SMALL})


def small_tensors(config: ModelConfig, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by official name."""
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, spec in vision_tensors(config).items():
        value = draw.standard_normal(spec.shape) / math.sqrt(spec.shape[-1])
        if "norm" in name:
            value = 1 + 0.2 * draw.standard_normal(spec.shape)
        tensors[name] = torch.from_numpy(value.astype(np.float32))
    return tensors


def small_encoder() -> VisionEncoder:
    """An encoder over ``small_tensors``."""
    config = small_config()
    return VisionEncoder(config, small_tensors(config), b"f" * 16)


def picture(width: int, height: int, *, seed: int = 0) -> Image.Image:
    """Noise over a slope, so that no two places look alike."""
    noise = np.random.default_rng(seed).integers(0, 120, (height, width, 3))
    slope = np.linspace(0, 130, width)[None, :, None] + np.linspace(0, 5, height)[:, None, None]
    return Image.fromarray((noise + slope).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """An image file's bytes."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def patched(width: int, height: int, config: VisionConfig, *, seed: int = 0) -> PatchedImage:
    """Pixels of the size that an image of ``width`` x ``height`` becomes."""
    shape = fit_image(width, height, config)
    return PatchedImage(shape, np.asarray(picture(shape.width, shape.height, seed=seed)))


def reference_embeddings(
    pixels: npt.NDArray[np.uint8], config: VisionConfig, tensors: dict[str, torch.Tensor]
) -> Numbers:
    """(tokens, hidden) of one image, in float64."""
    w = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    side, merge = config.patch_size, config.downsample_ratio
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    x = np.stack([_patch(pixels, row, column, side) for row in range(rows) for column in range(columns)])
    x = x @ w["vision.patch_embed.proj.weight"].T + w["vision.patch_embed.proj.bias"]
    places = [(row, column) for row in range(rows) for column in range(columns)]
    for block in range(config.num_hidden_layers):
        x = _block(x, places, config, w, f"vision.blocks.{block}.")
    features = _rms(x, w["vision.norm.weight"]).reshape(rows, columns, -1)
    out = [w["image_start"]]
    for top in range(0, rows, merge):
        for left in range(0, columns, merge):
            out.append(_align(_window(features, top, left, merge), w))
        out.append(w["image_newline"])
    return np.stack([*out, w["image_end"]])


def _patch(pixels: npt.NDArray[np.uint8], row: int, column: int, side: int) -> Numbers:
    values = []
    for channel in range(3):
        for y in range(side):
            for x in range(side):
                value = (float(pixels[row * side + y, column * side + x, channel]) / 255 - 0.5) / 0.5
                values.append(torch.tensor(value).to(torch.bfloat16).item())
    return np.array(values)


def _block(
    x: Numbers, places: list[tuple[int, int]], config: VisionConfig, w: dict[str, Numbers], prefix: str
) -> Numbers:
    heads, width = config.num_attention_heads, config.hidden_size
    size = width // heads
    normed = _rms(x, w[prefix + "norm1.weight"])
    q, k, v = np.split(normed @ w[prefix + "attn.wqkv.weight"].T + w[prefix + "attn.wqkv.bias"], 3, axis=1)
    mixed = np.empty_like(x)
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        turned_q = np.stack([_turn(q[i, part], place, config.rope_theta) for i, place in enumerate(places)])
        turned_k = np.stack([_turn(k[i, part], place, config.rope_theta) for i, place in enumerate(places)])
        score = turned_q @ turned_k.T / math.sqrt(size)
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        mixed[:, part] = weight / weight.sum(axis=1, keepdims=True) @ v[:, part]
    x = x + mixed @ w[prefix + "attn.wo.weight"].T + w[prefix + "attn.wo.bias"]
    gate, up = np.split(_rms(x, w[prefix + "norm2.weight"]) @ w[prefix + "mlp.w1.weight"].T, 2, axis=1)
    return x + (gate / (1 + np.exp(-gate)) * up) @ w[prefix + "mlp.w2.weight"].T


def _turn(head: Numbers, place: tuple[int, int], theta: float) -> Numbers:
    """Channel i is paired with channel i + half; the first quarter of angles follows the row, the next the column."""
    half, quarter = len(head) // 2, len(head) // 4
    out = np.empty_like(head)
    for i in range(half):
        angle = place[i // quarter] * theta ** (-2 * (i % quarter) / half)
        out[i] = head[i] * math.cos(angle) - head[i + half] * math.sin(angle)
        out[i + half] = head[i + half] * math.cos(angle) + head[i] * math.sin(angle)
    return out


def _window(features: Numbers, top: int, left: int, merge: int) -> Numbers:
    rows, columns, channels = features.shape
    values = []
    for channel in range(channels):
        for y in range(top, top + merge):
            for x in range(left, left + merge):
                values.append(features[y, x, channel] if y < rows and x < columns else 0.0)
    return np.array(values)


def _align(window: Numbers, w: dict[str, Numbers]) -> Numbers:
    hidden = w["aligner.w1.weight"] @ window + w["aligner.w1.bias"]
    hidden = np.array([0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in hidden])
    return w["aligner.w2.weight"] @ hidden + w["aligner.w2.bias"]


def _rms(x: Numbers, weight: Numbers) -> Numbers:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * weight


def write_vision_model(directory: Path) -> Path:
    """The tiny language model with a small vision encoder, as a model directory."""
    document = json.loads((TINY / "config.json").read_bytes())
    (directory / "config.json").write_text(json.dumps(document | {"vision_config": SMALL}))
    (directory / "compressed_token_map.json").write_bytes((TINY / "compressed_token_map.json").read_bytes())
    write_shards(directory, {"model.safetensors": tiny_tensors() | small_tensors(small_config())})
    return directory


@dataclass(frozen=True)
class Shown:
    """An image file and what stands for it in a prompt of the small model."""

    data: bytes
    digest: bytes
    tokens: int
    embeddings_ND: torch.Tensor

    @staticmethod
    def of(data: bytes) -> "Shown":
        """Encoded by itself, rounded as embeddings are when they are handed over."""
        config = small_config().vision
        assert config is not None
        shape, pixels = read_pixels(data, config, ImageLimits())
        embeddings_ND = small_encoder().encode([PatchedImage(shape, pixels)])[0].to(torch.bfloat16)
        return Shown(data, hashlib.sha256(data).digest(), shape.tokens, embeddings_ND)


def show(*parts: Shown | np.ndarray) -> tuple[np.ndarray, list[tuple[int, Shown]]]:
    """A prompt of text and images: ids, and where each image begins."""
    image_token = small_config().image_token_id
    ids: list[np.ndarray] = []
    images = []
    for part in parts:
        if isinstance(part, Shown):
            images.append((sum(map(len, ids)), part))
            ids.append(np.full(part.tokens, image_token))
        else:
            ids.append(part)
    return np.concatenate(ids), images


def greedy_with_images(
    ids: np.ndarray, images: list[tuple[int, Shown]], count: int, *, hit: int = 0
) -> list[int]:
    """What one process that holds the whole model answers, after a prefix hit of ``hit`` tokens."""
    backbone = tiny("f32q")
    spans = [ImageSpan(at, image.embeddings_ND) for at, image in images]
    window = backbone.config.text.sliding_window
    tokens = ids.tolist()
    for _ in range(count):
        plan = LogitsPlan(prefill=len(ids), decoder_replay=len(ids) > window, encoder_hit=hit, images=spans)
        logits_TV = LogitsRun(backbone, np.array(tokens), plan, block_tokens=8).run()
        tokens.append(int(logits_TV[-1].argmax()))
    return tokens[len(ids) :]
