"""What launchers do before they launch: refuse what a kernel cannot take, with the value in the message.

Shapes, dtypes and strides cost nothing to check. Values of indices lie on the device, and looking at them waits for it:
they are checked for tensors on the host, and on the device with ``EPDSERVE_KERNEL_CHECKS=1``. Kernels never follow an
index that is out of range in either case; they treat it as missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

CHECKS_VARIABLE: Final = "EPDSERVE_KERNEL_CHECKS"
FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
INDICES: Final = (torch.int32, torch.int64)
_ALIGNMENT: Final = 16  # bytes: what a thread loads at once


class LaunchRefusedError(ValueError):
    """A kernel cannot take these arguments."""


def check_tensor(
    name: str,
    tensor: Tensor,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    *,
    like: Tensor | None = None,
) -> None:
    """Refuse another dtype, shape, device, or a last dimension that does not lie side by side.

    Args:
        name: Of the argument, for the message.
        tensor: The argument.
        dtypes: Those the kernel takes.
        shape: None for a size that may be anything.
        like: Has the device to be on.

    Raises:
        LaunchRefusedError: With the value that will not do.
    """
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise LaunchRefusedError(f"{name} must be {wanted}, got {tensor.dtype}")
    if tensor.dim() != len(shape) or any(
        size not in (None, actual) for size, actual in zip(shape, tensor.shape, strict=True)
    ):
        raise LaunchRefusedError(f"{name} must have the shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise LaunchRefusedError(
            f"{name} must lie side by side in its last dimension, got strides {tensor.stride()}"
        )
    if like is not None and tensor.device != like.device:
        raise LaunchRefusedError(f"{name} is on {tensor.device}, not on {like.device}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Refuse gaps between rows.

    Raises:
        LaunchRefusedError: With the strides.
    """
    if not tensor.is_contiguous():
        raise LaunchRefusedError(f"{name} must be contiguous, got strides {tensor.stride()}")


def check_indices(name: str, index: Tensor, *, limit: int, least: int = 0) -> None:
    """Refuse indices outside ``least .. limit - 1``, where they are looked at (see the module).

    Raises:
        LaunchRefusedError: With the worst of them.
    """
    if not index.numel() or (index.device.type != "cpu" and os.environ.get(CHECKS_VARIABLE) != "1"):
        return
    lowest, highest = (int(value) for value in torch.aminmax(index))
    if lowest < least:
        raise LaunchRefusedError(f"{name} holds {lowest}, below {least}")
    if highest >= limit:
        raise LaunchRefusedError(f"{name} holds {highest}, of {limit}")


def check_multiple(name: str, value: int, of: int) -> None:
    """Refuse a size that is no multiple, or is zero.

    Raises:
        LaunchRefusedError: With the size.
    """
    if value <= 0 or value % of:
        raise LaunchRefusedError(f"{name} must be a positive multiple of {of}, got {value}")


def aligned_rows(tensor: Tensor) -> Tensor:
    """The same values with every row on a 16-byte boundary: the tensor itself if it is so, else a copy.

    The compiler lays a tile out by what it knows of the addresses, and a sum's order follows the layout. With this it
    always knows the same, so a row's bits do not depend on where it lay.
    """
    pitch = tensor.element_size()
    steps = [
        stride * pitch
        for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
        if size > 1
    ]
    if any(step % _ALIGNMENT for step in (tensor.data_ptr(), *steps)):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def queued_copy(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on ``device``; from a host to a GPU in the order of what the GPU was given before, without waiting.

    A copy from pageable memory would wait for all of that. PyTorch keeps the pinned pages until the copy is done.
    """
    target = torch.device(device)
    if tensor.device.type != "cpu" or target.type != "cuda":
        return tensor.to(target)
    return tensor.pin_memory().to(target, non_blocking=True)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not smaller; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()
