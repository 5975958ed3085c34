"""What a terminal shows: how far a run is, and what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from epdserve.loadtest.results.record import Record
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_FILE_WIDTH = 180
_LAST = 200  # requests that the middle on the line is of


def show(rows: Sequence[Sequence[str]], *, title: str = "", console: Console | None = None) -> None:
    """A table, headings first."""
    told = Table(title=title or None, title_justify="left")
    for number, name in enumerate(rows[0]):
        told.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows[1:]:
        told.add_row(*row)
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)  # a file has no width of its own
    console.print(told)


@contextmanager
def progress(sessions: int) -> Iterator[Callable[[int, int, Record | None], None]]:
    """A line on standard error while a run lasts, if that is a terminal.

    Yields:
        To be told: sessions ended, requests in flight, and a request that has just ended.
    """
    console = Console(stderr=True)
    waits: list[float] = []
    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("sending", total=sessions)

        def tell(ended: int, in_flight: int, record: Record | None) -> None:
            nonlocal failed
            if record is not None:
                failed += not record.expected
                waits.extend([record.ttft_s] if record.ttft_s is not None else [])
                del waits[:-_LAST]
            middle = f", TTFT p50 {1e3 * sorted(waits)[len(waits) // 2]:.0f} ms" if waits else ""
            words = f"{in_flight} in flight, {failed} not as expected{middle}"
            bar.update(task, completed=ended, description=words)

        yield tell
