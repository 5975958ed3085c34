"""From the workers' records, the index and the ledger to what placement reads: arrays, one element a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from epdserve.services.policy.pools import DecodePool, Floats, Indices, PrefillPool, WorkerNames, floats
from epdserve.services.router.estimates import Estimates
from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.types import WorkerInfo

# The machine's store, stores of other machines: only until some worker has fetched from such a one
_NEAR_BYTES_PER_S: Final = 2e9
_FAR_BYTES_PER_S: Final = 1e9
# By which share of a step a worker with full pages is taken to be slower than one with empty ones
_FULLNESS: Final = 0.5


def prefill_pool(
    infos: Sequence[WorkerInfo],
    *,
    hits: Mapping[str, int],
    stores: Mapping[str, str],
    ledger: InFlightLedger,
    estimates: Estimates,
) -> PrefillPool:
    """Prefill workers, sorted by name.

    Args:
        hits: Leading tokens of the prompt that each worker and store holds.
        stores: The store of each machine.
    """
    own = floats([hits.get(info.worker, 0) for info in infos])
    near = np.maximum(own, floats([hits.get(stores.get(info.machine, ""), 0) for info in infos]))
    far = np.maximum(near, max((hits.get(store, 0) for store in stores.values()), default=0))
    return PrefillPool(
        WorkerNames(info.worker for info in infos),
        machine_numbers(infos),
        floats([max(info.queued_tokens, ledger.tokens(info.worker)) for info in infos]),
        floats([estimates.prefill_tokens_per_s(info.worker) for info in infos]),
        np.stack((own, near, far)),
        fetch_speeds(infos),
        floats([estimates.trouble_s(info) for info in infos]),
    )


def fetch_speeds(infos: Sequence[WorkerInfo]) -> Floats:
    """Bytes a second of each worker's own pages (not used), its machine's store and stores of other machines.

    As its heartbeat tells them, measured in the last minute; of a worker that did not fetch, the mean of the others.
    The index does not know in which tier a store has a block, so the slower one of those in use counts.
    """
    # Arrays and no choice a worker: this is done for every request, and there may be hundreds of workers
    host = _measured([info.host_bytes_per_s for info in infos])
    ssd = _measured([info.ssd_bytes_per_s for info in infos])
    far = _measured([info.peer_bytes_per_s for info in infos])
    return np.stack(
        (
            np.ones(len(infos)),
            _filled(np.minimum(host, ssd), _NEAR_BYTES_PER_S),
            _filled(far, _FAR_BYTES_PER_S),
        )
    )


def _measured(speeds: Sequence[float]) -> Floats:
    """Infinite where nothing was measured."""
    told = floats(speeds)
    return np.where(told > 0, told, np.inf)


def _filled(speeds: Floats, otherwise: float) -> Floats:
    """With something in place of the infinite, which nobody measured."""
    known = np.isfinite(speeds)
    return np.where(known, speeds, speeds[known].mean() if known.any() else otherwise)


def decode_pool(
    infos: Sequence[WorkerInfo], *, ledger: InFlightLedger, estimates: Estimates, numbers: Mapping[str, int]
) -> DecodePool:
    """Decode workers, sorted by name; ``numbers`` are those that ``prefill_pool`` gave to machines."""
    running = floats([max(info.running, ledger.requests(info.worker)) for info in infos])
    request_s = floats([estimates.request_s(info.worker) for info in infos])
    step_s = floats([estimates.step_s(info.worker) for info in infos])
    reported = [(info.total_pages - info.free_pages) * info.block_tokens for info in infos]
    held = [max(0, pages, ledger.tokens(info.worker)) for pages, info in zip(reported, infos, strict=True)]
    return DecodePool(
        WorkerNames(info.worker for info in infos),
        np.array([numbers.get(info.machine, len(numbers) + 1) for info in infos], dtype=np.int64),
        running,
        floats(held),
        floats([ledger.output_tokens(info.worker) for info in infos]),
        floats([max(1, info.total_pages * info.block_tokens) for info in infos]),
        step_s,
        request_s,
        # Fuller workers come after emptier ones where all else is equal
        step_s
        * _FULLNESS
        / np.maximum(1.0, floats([info.total_pages * info.block_tokens for info in infos])),
        np.zeros(len(infos)),
        floats([estimates.trouble_s(info) for info in infos]),
    )


def machine_numbers(infos: Sequence[WorkerInfo]) -> Indices:
    """A number for each worker's machine."""
    numbers = machines(infos)
    return np.array([numbers[info.machine] for info in infos], dtype=np.int64)


def machines(infos: Sequence[WorkerInfo]) -> dict[str, int]:
    """Machines by name."""
    return {name: number for number, name in enumerate(sorted({info.machine for info in infos}))}
