"""From the workers' records, the index and the ledger to what placement reads: arrays, one element a worker.

There may be hundreds of workers and hundreds of requests a second. What only changes with the view of the cluster is
made an array once a view (``Fleet``); what changes with each request is looked up for all workers at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where ledger and estimates know the workers of one role, while their layouts are these."""

    ledger_layout: int
    estimates_layout: int
    in_ledger: Indices
    in_estimates: Indices


class Fleet:
    """The workers that may share blocks, as of one view. Owned by the event loop.

    Args:
        prefills, decodes: Ready workers of one layout, in any order.
        stores: The store of each machine.
    """

    def __init__(
        self,
        prefills: Sequence[WorkerInfo],
        decodes: Sequence[WorkerInfo],
        *,
        stores: Mapping[str, str],
        ledger: InFlightLedger,
        estimates: Estimates,
    ) -> None:
        self.prefills = sorted(prefills, key=_name)
        self.decodes = sorted(decodes, key=_name)
        self.by_name = {info.worker: info for info in (*self.prefills, *self.decodes)}
        self._ledger, self._estimates = ledger, estimates
        self._prefill_names = WorkerNames(map(_name, self.prefills))
        self._decode_names = WorkerNames(map(_name, self.decodes))
        self._rows: tuple[_Rows, _Rows] | None = None
        self._read_prefills(stores)
        self._read_decodes()

    def pools(self, hits: Mapping[str, int]) -> tuple[PrefillPool, DecodePool]:
        """What placement is told.

        Args:
            hits: Leading tokens of the prompt that each worker and store holds.
        """
        prefill_rows, decode_rows = self._known_rows()
        return self._prefill_pool(prefill_rows, hits), self._decode_pool(decode_rows)

    def _read_prefills(self, stores: Mapping[str, str]) -> None:
        infos = self.prefills
        numbers = {name: number for number, name in enumerate(sorted({info.machine for info in infos}))}
        names = sorted(set(stores.values()))
        places = {store: place for place, store in enumerate(names)}
        self._prefill_machines = _integers([numbers[info.machine] for info in infos])
        self._decode_machines = _integers(
            [numbers.get(info.machine, len(numbers) + 1) for info in self.decodes]
        )
        self._stores = names
        # The last place is of no store, which has nothing
        self._store_of = _integers([places.get(stores.get(info.machine, ""), len(names)) for info in infos])
        self._queued = floats([info.queued_tokens for info in infos])
        self._fetch_speeds = fetch_speeds(infos)
        self._prefill_ages = floats([info.step_age_s for info in infos])

    def _read_decodes(self) -> None:
        infos = self.decodes
        self._running = floats([info.running for info in infos])
        held = [(info.total_pages - info.free_pages) * info.block_tokens for info in infos]
        self._held = np.maximum(0.0, floats(held))
        self._total = np.maximum(1.0, floats([info.total_pages * info.block_tokens for info in infos]))
        self._decode_ages = floats([info.step_age_s for info in infos])
        self._no_hits = np.zeros(len(infos))

    def _known_rows(self) -> tuple[_Rows, _Rows]:
        rows, layouts = self._rows, (self._ledger.layout, self._estimates.layout)
        if rows is None or (rows[0].ledger_layout, rows[0].estimates_layout) != layouts:
            rows = self._rows = self._find_rows(self._prefill_names), self._find_rows(self._decode_names)
        return rows

    def _find_rows(self, names: Sequence[str]) -> _Rows:
        ledger, estimates = self._ledger, self._estimates
        return _Rows(ledger.layout, estimates.layout, ledger.rows(names), estimates.rows(names))

    def _prefill_pool(self, rows: _Rows, hits: Mapping[str, int]) -> PrefillPool:
        _, tokens, _ = self._ledger.in_flight(rows.in_ledger)
        return PrefillPool(
            self._prefill_names,
            self._prefill_machines,
            np.maximum(self._queued, tokens),
            self._estimates.prefill_speeds(rows.in_estimates),
            self._hit_tokens(hits),
            self._fetch_speeds,
            self._estimates.troubles_s(rows.in_estimates, self._prefill_ages),
        )

    def _hit_tokens(self, hits: Mapping[str, int]) -> Floats:
        """Of each worker: in its own pages, with its machine's store, with any store."""
        found = np.zeros((3, len(self.prefills)))
        if hits:
            get = hits.get
            found[0] = [get(name, 0) for name in self._prefill_names]
            in_stores = floats([*(get(name, 0) for name in self._stores), 0])
            np.maximum(found[0], in_stores[self._store_of], out=found[1])
            np.maximum(found[1], in_stores.max(), out=found[2])
        return found

    def _decode_pool(self, rows: _Rows) -> DecodePool:
        requests, tokens, output = self._ledger.in_flight(rows.in_ledger)
        step_s = self._estimates.steps_s(rows.in_estimates)
        return DecodePool(
            self._decode_names,
            self._decode_machines,
            np.maximum(self._running, requests),
            np.maximum(self._held, tokens),
            output,
            self._total,
            step_s,
            self._estimates.requests_s(step_s),
            # Fuller workers come after emptier ones where all else is equal
            step_s * _FULLNESS / self._total,
            self._no_hits,
            self._estimates.troubles_s(rows.in_estimates, self._decode_ages),
        )


def fetch_speeds(infos: Sequence[WorkerInfo]) -> Floats:
    """Bytes a second of each worker's own pages (not used), its machine's store and stores of other machines.

    As its heartbeat tells them, measured in the last minute; of a worker that did not fetch, the mean of the others.
    The index does not know in which tier a store has a block, so the slower one of those in use counts.
    """
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


def _integers(values: Sequence[int]) -> Indices:
    return np.array(values, dtype=np.int64)


def _name(info: WorkerInfo) -> str:
    return info.worker
