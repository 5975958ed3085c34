"""The device decides, and every launcher stands in for its reference."""

import importlib
import inspect

import pytest
import torch
from epdserve.kernels.dispatch import load_launcher, on_device
from epdserve.kernels.rope import apply_rope

FAMILIES = (
    "attention",
    "cache_ops",
    "compress",
    "engram",
    "indexer",
    "linear",
    "mhc",
    "moe",
    "norm",
    "quant",
    "rope",
    "sampling",
)


def _double_ref(x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
    """Twice x."""
    return x * 2 * times


class _OnGpu:
    is_cuda = True


def test_tensors_in_host_memory_go_to_the_reference() -> None:
    assert on_device(_double_ref, "no.such:module")(torch.ones(2), times=3).tolist() == [6.0, 6.0]


def test_tensors_on_a_gpu_go_to_the_launcher() -> None:
    choose = on_device(_double_ref, "launch:aligned_rows")
    with pytest.raises(AttributeError, match="element_size"):  # it was called, and this is no tensor
        choose(_OnGpu())  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_launcher_takes_what_its_reference_takes(family: str) -> None:
    package = importlib.import_module(f"epdserve.kernels.{family}")
    for name in package.__all__:
        launcher = getattr(getattr(package, name), "launcher", None)
        if launcher is not None:
            reference = inspect.signature(inspect.unwrap(getattr(package, name)))
            launched = inspect.signature(load_launcher(launcher))
            assert list(launched.parameters) == list(reference.parameters), name
            defaults = [parameter.default for parameter in launched.parameters.values()]
            assert defaults == [parameter.default for parameter in reference.parameters.values()], name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_module_bears_the_name_of_an_exported_function(family: str) -> None:
    """Its import would put the module in the function's place."""
    package = importlib.import_module(f"epdserve.kernels.{family}")
    for name in package.__all__:
        launcher = getattr(getattr(package, name), "launcher", None)
        if launcher is not None:
            load_launcher(launcher)
            assert callable(getattr(package, name)), name


def test_the_reference_stays_visible_behind_the_choice() -> None:
    assert inspect.unwrap(apply_rope).__name__ == "apply_rope_ref"
