"""Operations of the vision encoder in plain PyTorch (spec/modules 3.2 and 3.3). N = patches, H = heads, D = head width.

None of them mixes images, and none lets the bits of a row depend on rows of another image.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def grid_rotations_ref(rows: int, columns: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every patch of a grid, row by row.

    The first half of the angles turns with the patch's row, the second half with its column.

    Returns:
        Two (rows * columns, head_dim / 2) float32 tensors on the CPU.
    """
    if head_dim <= 0 or head_dim % 4:
        raise ValueError(f"a head of the vision encoder needs a multiple of 4 channels, got {head_dim}")
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2))
    down = torch.arange(rows, dtype=torch.float32)[:, None] * inv_freq
    across = torch.arange(columns, dtype=torch.float32)[:, None] * inv_freq
    angle = torch.cat((down.repeat_interleave(columns, dim=0), across.repeat(rows, 1)), dim=1)
    return angle.cos(), angle.sin()


def rotate_halves_ref(x_NHD: Tensor, cos_NP: Tensor, sin_NP: Tensor) -> Tensor:
    """Rotate channel i of the first half of each head with channel i of the second half; float32."""
    first, second = x_NHD.float().chunk(2, dim=-1)
    cos, sin = cos_NP.unsqueeze(1), sin_NP.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def image_attention_ref(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor) -> Tensor:
    """Every patch of one image attends to every other: (N, H, D) float32, scores scaled by D ** -0.5.

    Numerics: float32; bits depend on this image alone.
    """
    q, k, v = (part.float().transpose(0, 1).unsqueeze(0) for part in (q_NHD, k_NHD, v_NHD))
    mixed = functional.scaled_dot_product_attention(q, k, v)
    return mixed.squeeze(0).transpose(0, 1)


def merge_windows_ref(features_NC: Tensor, rows: int, columns: int, merge: int) -> Tensor:
    """Windows of ``merge`` x ``merge`` patches as one row each: (cells, C * merge * merge), cells row by row.

    The map is padded with zeros on the right and at the bottom. In a row the channel is outermost, then y, then x.
    """
    grid = features_NC.view(rows, columns, -1)
    grid = functional.pad(grid, (0, 0, 0, -columns % merge, 0, -rows % merge))
    windows = grid.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))  # (Y, y, X, x, C)
    merged: Tensor = windows.permute(0, 2, 4, 1, 3).flatten(2).flatten(0, 1)
    return merged


def silu_gate_ref(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; float32."""
    return gate.float() * torch.sigmoid(gate.float()) * up.float()


def gelu_ref(x: Tensor) -> Tensor:
    """The exact GELU, with the error function; float32."""
    return functional.gelu(x.float())
