"""The process that touches the device: works through units, says each row in a line of JSON.

``gpu_check`` starts it, and again behind the unit that ended it: a kernel that reads where it must not, takes the whole
process's use of a device with it, and one that never ends must be killed.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import triton
from epdserve.loadtest.gpu.case import Case, CaseMaker
from epdserve.loadtest.gpu.cases import case_makers
from epdserve.loadtest.gpu.layers import Weights
from epdserve.loadtest.gpu.report import NO_TIME, Row
from epdserve.loadtest.gpu.shapes import RELEASED, TINY, Shapes
from epdserve.loadtest.gpu.steps import Measured, time_decode, time_prefill, time_replay
from epdserve.loadtest.gpu.timing import Ceilings, Timer, measure_ceilings

LOST: Final = 3  # exit status: the device does not answer this process any more


@dataclass(frozen=True, slots=True)
class Order:
    """What the process is to do.

    Attributes:
        skip: Units that are done already.
        ends: When the units of each kind begin no more, on the monotonic clock.
        ceilings: Measured by a process before this one.
        warm: (i, n): run every n-th case once, from the i-th on, and say nothing: its kernels are compiled then.
    """

    device: str
    dry_run: bool
    only: str
    golden: str
    skip: int
    ends: dict[str, float]
    ceilings: tuple[float, float] | None = None
    warm: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that stand or fall together; ``kind`` is a key of ``Order.ends``."""

    name: str
    kind: str
    rows: Callable[[], Iterator[Row]]


def work(order: Order) -> int:
    """Do it; returns the exit status."""
    shapes, device = (TINY, "cpu") if order.dry_run else (RELEASED, order.device)
    torch.manual_seed(0)
    with torch.inference_mode():
        if order.warm is not None:
            return _compile(order, shapes, device)
        launched = _recorded() if order.dry_run else set()
        timer = Timer(device)
        name = torch.cuda.get_device_name() if timer.cuda else "CPU, interpreted"
        _say(device=f"{name}, torch {torch.__version__}, triton {triton.__version__}")
        ceilings = Ceilings(*order.ceilings) if order.ceilings else measure_ceilings(timer, device)
        _say(ceilings=[ceilings.bytes_per_s, ceilings.flops_per_s])
        for number, unit in enumerate(_units(order, shapes, device, timer, ceilings)):
            if number < order.skip:
                continue
            _say(unit=number, name=unit.name)
            if time.monotonic() > order.ends[unit.kind]:
                _say(row=asdict(Row(unit.name, NO_TIME)))
            elif not _rows_of(unit, order.ends[unit.kind]) and _is_lost(timer):
                return LOST
            gc.collect()
            if timer.cuda:
                torch.cuda.empty_cache()
        if order.dry_run:
            _say(launched=sorted(launched))
    return 0


def _recorded() -> set[str]:
    """Names of the kernels that the interpreter runs from now on."""
    from triton.runtime.interpreter import InterpretedFunction

    names: set[str] = set()
    run = InterpretedFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(self.fn.__name__)
        return run(self, *args, **kwargs)

    InterpretedFunction.run = recorded
    return names


def _rows_of(unit: Unit, until: float) -> bool:
    """Say a unit's rows; whether it came to its end."""
    try:
        for row in unit.rows():
            _say(row=asdict(row))
            if time.monotonic() > until:
                _say(row=asdict(Row(f"{unit.name}: the rest", NO_TIME)))
                break
    except Exception as error:  # noqa: BLE001 - the edge of every unit: a broken kernel must leave the others' rows
        text = f"FAILED: {type(error).__name__}: {str(error).strip()[:300]}".replace("\n", " ").replace(
            "|", "/"
        )
        _say(row=asdict(Row(unit.name, text)))
        return False
    return True


def _is_lost(timer: Timer) -> bool:
    if not timer.cuda:
        return False
    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except Exception:  # noqa: BLE001 - whatever it is, another process must go on
        return True
    return False


def _units(order: Order, shapes: Shapes, device: str, timer: Timer, ceilings: Ceilings) -> Iterator[Unit]:
    """All of them, in order; numbers must be the same in every process."""
    yield Unit("ceilings", "cases", lambda: iter(_ceiling_rows(ceilings)))
    for name, make in case_makers(shapes, device):
        if order.only in name:
            yield Unit(name, "cases", partial(_measure, name, make, timer, ceilings))
    if order.only:
        return
    if not order.dry_run:  # tests do that
        yield Unit("model", "model", partial(_model_rows, order.golden, device))
    made: list[Weights] = []
    for name, group in (("prefill", time_prefill), ("decoder replay", time_replay), ("decode", time_decode)):

        def times(
            group: Callable[[Shapes, Weights, Timer, str], Iterator[Measured]] = group,
        ) -> Iterator[Row]:
            if not made:
                made.append(Weights(shapes, device))
            for what, seconds in group(shapes, made[0], timer, device):
                yield Row(what, "ok", us=1e6 * seconds, graph=timer.captured if timer.cuda else None)

        yield Unit(f"layers: {name}", "layers", times)


def _ceiling_rows(ceilings: Ceilings) -> list[Row]:
    return [
        Row("copy", "", gbytes_per_s=ceilings.bytes_per_s / 1e9),
        Row("bfloat16 product", "", tflops_per_s=ceilings.flops_per_s / 1e12),
    ]


def _measure(name: str, make: CaseMaker, timer: Timer, ceilings: Ceilings) -> Iterator[Row]:
    """Check one case, then time it."""
    case: Case = make()
    problem = case.check()
    if not timer.cuda:
        yield Row(name, problem or "ok")  # the interpreter's time says nothing
        return
    seconds = timer.seconds(case.run)
    yield Row(
        name,
        problem or "ok",
        us=1e6 * seconds,
        gbytes_per_s=case.bytes_moved / seconds / 1e9,
        tflops_per_s=case.flops / seconds / 1e12 if case.flops else None,
        of_ceiling=ceilings.floor_s(case.bytes_moved, case.flops) / seconds,
        graph=timer.captured,
    )


def _model_rows(golden: str, device: str) -> Iterator[Row]:
    """Goldens, batch invariance, graphs and step times of the model as workers run it."""
    from epdserve.loadtest.gpu.model import check_model  # its packages may be missing on a bare machine

    for what, measured, note in check_model(Path(golden), device):
        right = not note.startswith("FAILED")
        yield Row(f"model: {what}: {measured}" + (f", {note}" if right else ""), "ok" if right else note)


def _compile(order: Order, shapes: Shapes, device: str) -> int:
    """Launch some cases once: Triton keeps what it compiled on disk, where the process that measures finds it."""
    assert order.warm is not None
    first, step = order.warm
    for number, (name, make) in enumerate(case_makers(shapes, device)):
        if number % step == first and order.only in name and time.monotonic() < order.ends["cases"]:
            try:
                make().run()
                if device.startswith("cuda"):
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
            except Exception as error:  # noqa: BLE001 - the process that measures will say so in a row
                _say(failed=name, error=type(error).__name__)
                if "CUDA" in str(error):
                    return LOST
    return 0


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)
