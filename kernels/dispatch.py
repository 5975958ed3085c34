"""Chooses by device: Triton for tensors on a GPU; for all others the reference, or native code that stands in for it
(``host/``). The only place that does.

A family's ``__init__.py`` exports ``on_device(reference, "<module>:<launcher>")``. The module with the kernel is
imported at the first call that needs it, so nothing here needs Triton where there is no GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")
_interpreted: list[bool] = []  # not empty inside ``launchers_on_host``


@contextmanager
def launchers_on_host() -> Iterator[None]:
    """Launchers for tensors in host memory too, in this block: Triton's interpreter runs them. For tests."""
    _interpreted.append(True)
    try:
        yield
    finally:
        _interpreted.pop()


def on_device(
    reference: Callable[_P, _R], launcher: str, *, takes: Callable[[Tensor], bool] = lambda _: True
) -> Callable[_P, _R]:
    """``reference`` for tensors in host memory, ``launcher`` for tensors on a GPU.

    Args:
        reference: Its first argument is a tensor and is given by position; its device decides.
        launcher: ``"norm.rms:rms_norm"``: a module below ``epdserve.kernels`` and the name of a function in it, with
            the arguments, the result and the errors of the reference.
        takes: Whether the launcher takes a first argument of this shape; the reference computes the others on the GPU.

    Returns:
        A function with the reference's signature; ``inspect.unwrap`` gives the reference, ``launcher`` the name.
    """
    launched: list[Callable[_P, _R]] = []
    hosted: list[Callable[_P, _R]] = []

    @wraps(reference)
    def choose(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        first = cast(Tensor, args[0])
        if not (first.is_cuda or _interpreted) or not takes(first):
            if not hosted:
                hosted.append(stand_in(reference))
            return hosted[0](*args, **kwargs)
        if not launched:
            launched.append(cast(Callable[_P, _R], load_launcher(launcher)))
        return launched[0](*args, **kwargs)

    choose.launcher = launcher  # type: ignore[attr-defined]
    return choose


def on_host(reference: Callable[_P, _R]) -> Callable[_P, _R]:
    """``reference``, or native code that stands in for it, on any device; for functions without a launcher."""
    hosted: list[Callable[_P, _R]] = []

    @wraps(reference)
    def choose(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not hosted:
            hosted.append(stand_in(reference))
        return hosted[0](*args, **kwargs)

    return choose


def stand_in(reference: Callable[_P, _R]) -> Callable[_P, _R]:
    """What is called for tensors in host memory; the reference where nothing native was built."""
    rows = importlib.import_module("epdserve.kernels.host.rows")
    return cast(Callable[_P, _R], rows.STAND_INS.get(reference, reference))


def load_launcher(launcher: str) -> Callable[..., object]:
    """The function that ``launcher`` names; imports Triton."""
    module, _, name = launcher.partition(":")
    return cast(Callable[..., object], getattr(importlib.import_module(f"epdserve.kernels.{module}"), name))
