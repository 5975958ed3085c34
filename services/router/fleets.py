"""The fleets of a view: which ready workers may share blocks. Made once a view, and anew for who must avoid some."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from epdserve.services.router.cluster import Cluster
from epdserve.services.router.estimates import Estimates
from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.router.snapshot import MEASURED_EVERY_S, Fleet
from epdserve.services.types import WorkerInfo, WorkerRole, WorkerState

# One life of a worker: its replacement under the same name is another one
Life: TypeAlias = tuple[str, str]

Layout: TypeAlias = tuple[bytes, int]
"""What workers must agree on to share blocks: their root, and the tokens of a block."""


class Fleets:
    """Owned by the event loop. Keeps what was made of the latest view, as long as the cluster shows the same one."""

    def __init__(
        self, cluster: Cluster, ledger: InFlightLedger, estimates: Estimates, *, model_name: str = ""
    ) -> None:
        self._cluster = cluster
        self._ledger, self._estimates = ledger, estimates
        self._model_name = model_name
        self._view: Sequence[WorkerInfo] = ()
        self._made: dict[bool, Mapping[Layout, Fleet]] = {}
        self._ready: dict[WorkerRole, list[WorkerInfo]] = {}
        self._context: int | None = None

    def prepare(self) -> None:
        """Look at the view, and at what was measured of its workers, for the requests to come."""
        for fleet in self.of((), deterministic=False).values():
            fleet.look_again(older_than_s=MEASURED_EVERY_S / 2)

    def ready(self, role: WorkerRole, avoid: Collection[Life] = ()) -> list[WorkerInfo]:
        """Workers of a role that take work, without the lives in ``avoid``."""
        self._look()
        found = self._ready.get(role, [])
        return [info for info in found if (info.worker, info.incarnation) not in avoid]

    def max_context_tokens(self) -> int | None:
        """Longest context that every ready worker takes, None without workers."""
        self._look()
        return self._context

    def of(self, avoid: Collection[Life], *, deterministic: bool) -> Mapping[Layout, Fleet]:
        """Fleets with a prefill and a decode worker, by layout in order of it; none without such.

        Args:
            avoid: Lives that must not be in them.
            deterministic: Of blocks of deterministic requests.
        """
        self._look()
        if avoid:
            return self._make(avoid, deterministic=deterministic)
        if deterministic not in self._made:
            self._made[deterministic] = self._make((), deterministic=deterministic)
        return self._made[deterministic]

    def missing(self, avoid: Collection[Life]) -> str:
        """Why there is no fleet."""
        for role, name in ((WorkerRole.PREFILL, "prefill"), (WorkerRole.DECODE, "decode")):
            if not self.ready(role, avoid):
                return name
        return "matching prefill and decode"

    def _look(self) -> None:
        """Begin anew if the cluster shows another view."""
        view = self._cluster.workers()
        # Only what cannot change tells by being the same object that nothing has changed
        if view is self._view and isinstance(view, tuple):
            return
        self._view, self._made, self._ready = view, {}, {}
        for info in view:
            if info.state is WorkerState.READY and self._model_name in ("", info.model_name):
                self._ready.setdefault(info.role, []).append(info)
        infos = (*self._ready.get(WorkerRole.PREFILL, ()), *self._ready.get(WorkerRole.DECODE, ()))
        self._context = min((info.max_context_tokens for info in infos), default=None)
        names = [info.worker for info in view]
        self._estimates.keep(names)
        self._ledger.keep(names)

    def _make(self, avoid: Collection[Life], *, deterministic: bool) -> Mapping[Layout, Fleet]:
        prefills = _by_layout(self.ready(WorkerRole.PREFILL, avoid), deterministic=deterministic)
        decodes: dict[bytes, list[WorkerInfo]] = {}
        for info in self.ready(WorkerRole.DECODE, avoid):
            decodes.setdefault(root_of(info, deterministic=deterministic), []).append(info)
        stores = {info.machine: info.worker for info in self.ready(WorkerRole.STORE, avoid)}
        return {
            layout: Fleet(
                prefills[layout],
                decodes[layout[0]],
                stores=stores,
                ledger=self._ledger,
                estimates=self._estimates,
            )
            for layout in sorted(prefills)
            if layout[0] and layout[0] in decodes
        }


def root_of(info: WorkerInfo, *, deterministic: bool) -> bytes:
    """Root of the blocks that a request would meet at a worker; empty if it takes none of this kind."""
    return info.deterministic_root if deterministic else info.cache_root


def _by_layout(infos: Sequence[WorkerInfo], *, deterministic: bool) -> dict[Layout, list[WorkerInfo]]:
    found: dict[Layout, list[WorkerInfo]] = {}
    for info in infos:
        found.setdefault((root_of(info, deterministic=deterministic), info.block_tokens), []).append(info)
    return found
