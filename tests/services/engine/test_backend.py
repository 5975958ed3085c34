"""What names a back end: all that its bits depend on beside the model."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from epdserve.services.engine import backend

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are made anew by every call."""
    monkeypatch.setattr(backend, "backend_bits", backend.backend_bits.__wrapped__)


def test_other_machine_code_of_the_same_source_is_another_back_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set()
    for compiler in ("one", "another"):
        library = tmp_path / compiler
        library.write_text(compiler)
        monkeypatch.setattr(backend, "native", SimpleNamespace(__file__=str(library)))
        names.add(backend.backend_bits(CPU))
    monkeypatch.setattr(backend, "native", None)
    names.add(backend.backend_bits(CPU))
    assert len(names) == 3


def test_torch_kernels_and_processor_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = backend.backend_bits(CPU)
    assert torch.__version__ in before
    for part, value in (("_sources", lambda: "other kernels"), ("_processor", lambda: "another processor")):
        with monkeypatch.context() as changed:
            changed.setattr(backend, part, value)
            assert backend.backend_bits(CPU) != before


def test_a_gpu_is_named_with_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    name = backend.backend_bits(torch.device("cuda"))
    assert name.startswith("NVIDIA H200 9.0, CUDA ")
    assert "triton" in name
    assert backend._sources() in name
