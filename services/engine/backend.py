"""What decides the bits of a step beyond weights, layout and number formats: code, libraries, processor."""

import platform
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from epdserve import kernels, model
from epdserve.kernels.host.rows import native

_UNUSED = frozenset({"demo", "vision", "checksum"})  # rooms that no row of the backbone comes through
_CPU_FACTS = Path("/proc/cpuinfo")


@cache
def backend_bits(device: torch.device) -> str:
    """Names a back end: workers with the same words compute the same bits, by row invariance (kernels/README.md).

    Kernels and model code count by their source, since nobody would remember to raise a version; a changed comment
    costs misses. Native rows count by their machine code, which another compiler makes otherwise. The processor counts
    by its model: libraries of linear algebra choose their code by it.
    """
    return f"{_device(device)}; torch {torch.__version__}; code {_sources()}"


@cache
def _sources() -> str:
    """Digest of every file of kernels and model that a row's bits may depend on."""
    digest = blake2b(digest_size=16)
    for package in (kernels, model):
        for root in package.__path__:
            for file in sorted(Path(root).rglob("*.py")):
                name = file.relative_to(root)
                if not _UNUSED.intersection(name.parts):
                    source = file.read_bytes()
                    digest.update(f"{package.__name__} {name} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        return f"{name} {major}.{minor}, CUDA {torch.version.cuda}, triton {_triton()}"
    host = "plain rows" if native is None else f"native rows {_digest(Path(native.__file__).read_bytes())}"
    return f"{device.type}, {host}, {platform.machine()} {_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:  # the wide way alone
        return "none"


def _processor() -> str:
    """The processor's model, as Linux tells it."""
    try:
        lines = _CPU_FACTS.read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
