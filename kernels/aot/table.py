"""The compiled kernels as Markdown: what the machine code takes, and the time that a call cannot undercut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from epdserve.kernels.aot.compile import TARGETS, Usage
from epdserve.kernels.aot.hardware import DEVICES
from epdserve.kernels.catalogue import Entry

Usages = Mapping[str, Mapping[str, Usage]]  # by entry, then by target


def spills(entries: Sequence[Entry], usages: Usages) -> list[str]:
    """Hot kernels that spill without a reason, and reasons that have outlived their spill."""
    found = []
    for entry in entries:
        spilled = {target: usage.spilled_bytes for target, usage in usages[entry.name].items()}
        if any(spilled.values()) and entry.hot and not entry.spill_reason:
            found.append(f"{entry.name} spills {spilled} bytes a thread")
        if entry.spill_reason and not any(spilled.values()):
            found.append(f"{entry.name} no longer spills: drop its reason")
    return found


def render(entries: Sequence[Entry], usages: Usages) -> str:
    """Both tables, and the reasons of what spills or is left out."""
    return "\n".join([*_usage_rows(entries, usages), "", *_roofline_rows(entries), "", *_notes(entries)])


def _usage_rows(entries: Sequence[Entry], usages: Usages) -> Iterator[str]:
    targets = list(TARGETS)
    yield (
        "| kernel | warps | "
        + " | ".join(f"{target}: registers, spilled, shared" for target in targets)
        + " |"
    )
    yield "|---" * (2 + len(targets)) + "|"
    for entry in entries:
        cells = [_cell(usages[entry.name].get(target)) for target in targets]
        yield f"| {entry.name} | {entry.num_warps} | " + " | ".join(cells) + " |"


def _cell(usage: Usage | None) -> str:
    if usage is None:
        return "-"
    return f"{usage.registers}, {usage.spilled_bytes}, {usage.shared_bytes:,}"


def _roofline_rows(entries: Sequence[Entry]) -> Iterator[str]:
    yield (
        "| kernel | call | MB | GFLOP | "
        + " | ".join(f"{device.name} us" for device in DEVICES)
        + " | bound |"
    )
    yield "|---" * (5 + len(DEVICES)) + "|"
    for entry in entries:
        for work in entry.work:
            times = [f"{device.roofline_us(work):.2f}" for device in DEVICES]
            first = DEVICES[0]
            memory = work.bytes_moved / first.bytes_per_s >= work.flops / first.flops[work.rate]
            yield (
                f"| {entry.name} | {work.shape} | {work.bytes_moved / 1e6:.2f} | {work.flops / 1e9:.2f} | "
                + " | ".join(times)
                + f" | {'memory' if memory else work.rate} |"
            )


def _notes(entries: Sequence[Entry]) -> Iterator[str]:
    for entry in entries:
        if entry.spill_reason:
            yield f"- {entry.name} spills: {entry.spill_reason}"
        for target, reason in entry.not_for.items():
            yield f"- {entry.name} is not compiled for {target}: {reason}"
