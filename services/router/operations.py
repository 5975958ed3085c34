"""What the router lends to its administrator: its load, and the stores of the cluster."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Final

from epdserve.kvstore.hashing import tenant_label
from epdserve.services.errors import InvalidRequest, ServiceError
from epdserve.services.router.auth import tenant_key
from epdserve.services.router.http_errors import NotFound
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.tenancy.tenant import Tenant
from epdserve.services.rpc.client import WorkerClient
from epdserve.services.rpc.pages import forget_blocks
from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.types import WorkerInfo, WorkerRole

_CALL_S: Final = 10.0


class RouterOperations:
    """Implements ``admin.Operations``.

    Args:
        token: The cluster token.
    """

    def __init__(self, parts: RouterParts, *, token: str) -> None:
        self._parts, self._token = parts, token

    def load(self) -> Mapping[str, Any]:
        """See ``Operations``."""
        parts = self._parts
        return {
            "admission": asdict(parts.admission.load),
            "bodies_bytes": parts.bodies.held_bytes,
            "workers": [_worker(info) for info in parts.cluster.workers()],
        }

    def explain(self, request_id: str) -> Mapping[str, Any] | None:
        """See ``Operations``."""
        # By its x-request-id, or by the id of its answer, which has a prefix
        for name in (request_id, *re.split("[-_]", request_id, maxsplit=1)[1:]):
            if (pairs := self._parts.placer.explain(name)) is not None:
                return {"request": request_id, "pairs": [asdict(pair) for pair in pairs]}
        return None

    def present(self) -> Mapping[str, Any]:
        """See ``Operations``."""
        parts = self._parts
        return {
            "model": parts.config.model_name,
            "router": parts.config.router_id,
            "version": version("epdserve"),
            "workers": [_worker(info) for info in parts.cluster.workers()],
            **parts.present.told(),
        }

    async def drain(self, worker: str, wanted: bool) -> None:
        """See ``Operations``.

        Raises:
            NotFound: No worker of this name is alive, and it was to drain.
            Unavailable: The registry does not answer.
        """
        if wanted and worker not in {info.worker for info in self._parts.cluster.workers()}:
            raise NotFound("no worker of this name is alive")
        await self._parts.cluster.drain(worker, wanted)

    async def forget(self, tenant: Tenant | None) -> Mapping[str, Any]:
        """See ``Operations``. Workers let go of all blocks in their pages: those of others are found in stores again.

        Stores delete a tenant's label, or the roots of all models that are served. Workers are told once more after
        them: a request that was running may have brought blocks up meanwhile. A tenant's users and salts have its
        label, too.

        Raises:
            InvalidRequest: Tenants are not kept apart.
        """
        if tenant is not None and self._parts.config.isolation == "none":
            raise InvalidRequest("isolation is none: no tenant's blocks are kept apart from another's")
        told = [(info.cache_root, info.deterministic_root) for info in self._parts.cluster.workers()]
        roots = {root for pair in told for root in pair if root}
        label = None if tenant is None else self._label(tenant)
        workers = self._of(WorkerRole.PREFILL, WorkerRole.DECODE)
        stores = self._of(WorkerRole.STORE)
        failed = [
            *await self._each(workers, self._empty),
            *await self._each(stores, lambda info: self._delete(info, label, roots)),
            *await self._each(workers, self._empty),
        ]
        names = sorted({info.worker: code for info, code in failed}.items())
        broken = {name for name, _ in names}
        return {
            "workers": sum(info.worker not in broken for info in workers),
            "stores": sum(info.worker not in broken for info in stores),
            "failed": [{"worker": name, "error": code} for name, code in names],
        }

    def _of(self, *roles: WorkerRole) -> list[WorkerInfo]:
        return [info for info in self._parts.cluster.workers() if info.role in roles]

    async def _each(
        self, workers: Sequence[WorkerInfo], act: Callable[[WorkerInfo], Awaitable[None]]
    ) -> list[tuple[WorkerInfo, str]]:
        """Do something to all of them side by side; who failed, and how."""

        async def one(info: WorkerInfo) -> str | None:
            try:
                await act(info)
            except ServiceError as error:
                return error.code
            return None

        codes = await asyncio.gather(*(one(info) for info in workers))
        return [(info, code) for info, code in zip(workers, codes, strict=True) if code is not None]

    async def _empty(self, info: WorkerInfo) -> None:
        async with WorkerClient(info.address, token=self._token, worker=info.worker) as client:
            await forget_blocks(client, deadline_s=_CALL_S)

    async def _delete(self, info: WorkerInfo, tenant: bytes | None, roots: set[bytes]) -> None:
        """Delete a tenant's label from a store, or all roots if there is none."""
        async with StoreClient(info.address, token=self._token, worker=info.worker) as client:
            if tenant is not None:
                await client.delete_tenant(tenant, deadline_s=_CALL_S)
                return
            for root in sorted(roots):
                await client.delete_root(root, deadline_s=_CALL_S)

    def _label(self, tenant: Tenant) -> bytes:
        config = self._parts.config
        key = tenant_key(
            config.isolation,
            key_name=tenant.cache_name,
            user="",
            cache_salt="",
            epoch=self._parts.gate.epochs.stamp(tenant),
        )
        return tenant_label(key)


def _worker(info: WorkerInfo) -> dict[str, Any]:
    return {
        "worker": info.worker,
        "role": info.role.value,
        "state": info.state.value,
        "running": info.running,
        "queued_tokens": info.queued_tokens,
        "free_pages": info.free_pages,
        "total_pages": info.total_pages,
        "machine": info.machine,
        "address": info.address,
        "step_age_s": round(info.step_age_s, 3),
    }
