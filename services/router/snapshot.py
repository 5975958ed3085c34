"""From the workers' records, the index and the ledger to what placement reads: arrays, one element a worker.

There may be hundreds of workers and hundreds of requests a second. What only changes with the view of the cluster is
made an array once a view (``Fleet``); what changes with each request is looked up for all workers at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import numpy as np
from epdserve.services.policy.pools import DecodePool, Floats, Indices, PrefillPool, WorkerNames
from epdserve.services.router.estimates import Estimates
from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.types import WorkerInfo

# The machine's store, stores of other machines: only until some worker has fetched from such a one
_NEAR_BYTES_PER_S: Final = 2e9
_FAR_BYTES_PER_S: Final = 1e9
# By which share of a step a worker with full pages is taken to be slower than one with empty ones
_FULLNESS: Final = 0.5


# What was measured of workers is looked at again so often, and whenever a call has failed
MEASURED_EVERY_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class _Measured:
    """What was measured of workers, prefill and decode, and where ledger and estimates know them."""

    layouts: tuple[int, int]
    failures: int
    at: float
    in_ledger: tuple[Indices, Indices]
    in_estimates: tuple[Indices, Indices]
    tokens_per_s: Floats
    step_s: Floats
    request_s: Floats
    token_s: Floats
    troubles_s: tuple[Floats, Floats]


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
        self._measured: _Measured | None = None
        self._read_prefills(stores)
        self._read_decodes()

    def pools(self, hits: Mapping[str, int]) -> tuple[PrefillPool, DecodePool]:
        """What placement is told.

        Args:
            hits: Leading tokens of the prompt that each worker and store holds.
        """
        measured = self.look_again()
        in_prefills, in_decodes = measured.in_ledger
        _, ahead, _ = self._ledger.in_flight(in_prefills)
        requests, tokens, output = self._ledger.in_flight(in_decodes)
        prefills = PrefillPool(
            self._prefill_names,
            self._prefill_machines,
            np.maximum(self._queued, ahead),
            measured.tokens_per_s,
            self._hit_tokens(hits),
            self._fetch_speeds,
            measured.troubles_s[0],
        )
        decodes = DecodePool(
            self._decode_names,
            self._decode_machines,
            np.maximum(self._running, requests),
            np.maximum(self._held, tokens),
            output,
            self._total,
            measured.step_s,
            measured.request_s,
            measured.token_s,
            self._no_hits,
            measured.troubles_s[1],
        )
        return prefills, decodes

    def _read_prefills(self, stores: Mapping[str, str]) -> None:
        infos = self.prefills
        names = sorted(set(stores.values()))
        places = {store: place for place, store in enumerate(names)}
        self._stores = len(names)
        self._places = {store: len(infos) + place for store, place in places.items()}
        self._places.update({name: place for place, name in enumerate(self._prefill_names)})
        self._prefill_machines, self._decode_machines = _machines(infos, self.decodes)
        # The last place is of no store, which has nothing
        self._store_of = _integers([places.get(stores.get(info.machine, ""), len(names)) for info in infos])
        self._queued, self._prefill_ages = _columns(infos, "queued_tokens", "step_age_s")
        self._fetch_speeds = fetch_speeds(infos)

    def _read_decodes(self) -> None:
        self._running, total, free, block_tokens, self._decode_ages = _columns(
            self.decodes, "running", "total_pages", "free_pages", "block_tokens", "step_age_s"
        )
        self._held = np.maximum(0.0, (total - free) * block_tokens)
        self._total = np.maximum(1.0, total * block_tokens)
        self._no_hits = np.zeros(len(self.decodes))

    def look_again(self, older_than_s: float = MEASURED_EVERY_S) -> _Measured:
        """What was measured, not older than a moment."""
        ledger, estimates, known = self._ledger, self._estimates, self._measured
        layouts, now = (ledger.layout, estimates.layout), estimates.now()
        if (
            known is not None
            and (known.layouts, known.failures) == (layouts, estimates.failures)
            and now - known.at < older_than_s
        ):
            return known
        if known is None or known.layouts != layouts:
            in_ledger = ledger.rows(self._prefill_names), ledger.rows(self._decode_names)
            prefills, decodes = estimates.rows(self._prefill_names), estimates.rows(self._decode_names)
        else:
            in_ledger, (prefills, decodes) = known.in_ledger, known.in_estimates
        step_s, request_s = estimates.decode_steps_s(decodes)
        self._measured = known = _Measured(
            layouts,
            estimates.failures,
            now,
            in_ledger,
            (prefills, decodes),
            estimates.prefill_speeds(prefills),
            step_s,
            request_s,
            # Fuller workers come after emptier ones where all else is equal
            step_s * _FULLNESS / self._total,
            (
                estimates.troubles_s(prefills, self._prefill_ages),
                estimates.troubles_s(decodes, self._decode_ages),
            ),
        )
        return known

    def _hit_tokens(self, hits: Mapping[str, int]) -> Floats:
        """Of each worker: in its own pages, with its machine's store, with any store."""
        count = len(self.prefills)
        found = np.zeros((3, count))
        if not hits:
            return found
        # Prefill workers, stores, the store of machines without one, and what has left
        tokens = np.zeros(count + self._stores + 2)
        places = self._places
        for name, held in hits.items():
            tokens[places.get(name, -1)] = held
        stores = tokens[count:-1]
        found[0] = tokens[:count]
        np.maximum(found[0], stores.take(self._store_of), out=found[1])
        np.maximum(found[1], stores.max(), out=found[2])
        return found


def fetch_speeds(infos: Sequence[WorkerInfo]) -> Floats:
    """Bytes a second of each worker's own pages (not used), its machine's store and stores of other machines.

    As its heartbeat tells them, measured in the last minute; of a worker that did not fetch, the mean of the others.
    The index does not know in which tier a store has a block, so the slower one of those in use counts.
    """
    told = _columns(infos, "host_bytes_per_s", "ssd_bytes_per_s", "peer_bytes_per_s")
    host, ssd, far = np.where(told > 0, told, np.inf)
    return np.stack(
        (
            np.ones(len(infos)),
            _filled(np.minimum(host, ssd), _NEAR_BYTES_PER_S),
            _filled(far, _FAR_BYTES_PER_S),
        )
    )


def _filled(speeds: Floats, otherwise: float) -> Floats:
    """With something in place of the infinite, which nobody measured."""
    known = np.isfinite(speeds)
    return np.where(known, speeds, speeds[known].mean() if known.any() else otherwise)


def _columns(infos: Sequence[WorkerInfo], *names: str) -> Floats:
    """Numbers of records: a row a name, an element a worker."""
    return np.array(list(map(attrgetter(*names), infos)), dtype=np.float64).reshape(-1, len(names)).T


def _machines(prefills: Sequence[WorkerInfo], decodes: Sequence[WorkerInfo]) -> tuple[Indices, Indices]:
    """Number of each worker's machine; those without a prefill worker share one, which is no machine's."""
    numbers = {name: number for number, name in enumerate(sorted({info.machine for info in prefills}))}
    return (
        _integers([numbers[info.machine] for info in prefills]),
        _integers([numbers.get(info.machine, len(numbers) + 1) for info in decodes]),
    )


def _integers(values: Sequence[int]) -> Indices:
    return np.array(values, dtype=np.int64)


def _name(info: WorkerInfo) -> str:
    return info.worker
