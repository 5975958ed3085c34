"""What launchers refuse before they launch."""

import pytest
import torch
from epdserve.kernels.launch import (
    CHECKS_VARIABLE,
    LaunchRefusedError,
    aligned_rows,
    check_contiguous,
    check_indices,
    check_multiple,
    check_tensor,
    next_power_of_2,
    queued_copy,
)


def test_indices_on_the_host_are_always_looked_at() -> None:
    check_indices("page", torch.tensor([0, 4]), limit=5)
    check_indices("page", torch.empty(0, dtype=torch.int64), limit=0)
    check_indices("page", torch.tensor([-1, 4]), limit=5, least=-1)
    with pytest.raises(LaunchRefusedError, match="page holds 5, of 5"):
        check_indices("page", torch.tensor([0, 5]), limit=5)
    with pytest.raises(LaunchRefusedError, match="page holds -1, below 0"):
        check_indices("page", torch.tensor([-1]), limit=5)


def test_indices_on_a_device_are_looked_at_with_the_debug_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device = torch.empty(3, dtype=torch.int64, device="meta")  # has no values: looking at them fails
    check_indices("page", on_device, limit=1)
    monkeypatch.setenv(CHECKS_VARIABLE, "1")
    with pytest.raises(RuntimeError):
        check_indices("page", on_device, limit=1)


def test_a_tensor_is_refused_with_what_is_wrong_about_it() -> None:
    x = torch.zeros(2, 3)
    check_tensor("x", x, (torch.float32,), (None, 3))
    with pytest.raises(LaunchRefusedError, match=r"x must be bfloat16, got torch\.float32"):
        check_tensor("x", x, (torch.bfloat16,), (2, 3))
    with pytest.raises(LaunchRefusedError, match=r"the shape \(2, 4\), got \(2, 3\)"):
        check_tensor("x", x, (torch.float32,), (2, 4))
    with pytest.raises(LaunchRefusedError, match=r"strides \(1, 3\)"):
        check_tensor("x", x.t(), (torch.float32,), (3, 2))
    with pytest.raises(LaunchRefusedError, match="on meta, not on cpu"):
        check_tensor("x", x.to("meta"), (torch.float32,), (2, 3), like=x)
    with pytest.raises(LaunchRefusedError, match=r"strides \(6, 1\)"):
        check_contiguous("x", torch.zeros(2, 6)[:, :3])
    with pytest.raises(LaunchRefusedError, match="multiple of 32, got 33"):
        check_multiple("channels", 33, 32)


def test_rows_are_copied_only_if_one_is_not_on_a_16_byte_boundary() -> None:
    wide = torch.arange(64, dtype=torch.float32).view(4, 16)
    assert aligned_rows(wide) is wide
    assert aligned_rows(wide[:, 4:8]).data_ptr() == wide[:, 4:8].data_ptr()
    shifted = wide[:, 1:5]
    assert torch.equal(aligned_rows(shifted), shifted)
    assert aligned_rows(shifted).data_ptr() % 16 == 0
    narrow = wide.view(8, 8)[:, :6].contiguous()  # rows of 24 bytes
    assert aligned_rows(narrow) is not narrow


def test_powers_of_two() -> None:
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 512, 513)] == [1, 1, 2, 4, 512, 1024]


class _HostTensor:
    """A tensor in host memory that is asked onto a GPU; notes how."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.asked: list[object] = []

    def pin_memory(self) -> "_HostTensor":
        self.asked.append("pinned")
        return self

    def to(self, target: torch.device, *, non_blocking: bool = False) -> "_HostTensor":
        self.asked += [target.type, non_blocking]
        return self


def test_a_copy_to_a_gpu_is_queued_and_one_to_a_host_is_none() -> None:
    tensor = _HostTensor()
    queued_copy(tensor, "cuda")  # type: ignore[arg-type]
    assert tensor.asked == ["pinned", "cuda", True]
    here = torch.ones(2)
    assert queued_copy(here, "cpu") is here
