"""What the router lends to its administrator: its load, and the stores of the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from epdserve.kvstore.hashing import tenant_label
from epdserve.services.errors import InvalidRequest, ServiceError
from epdserve.services.router.auth import tenant_key
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.tenancy.tenant import Tenant
from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.types import WorkerInfo, WorkerRole

_STORE_S: Final = 10.0


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
        pairs = self._parts.placer.explain(request_id)
        return None if pairs is None else {"request": request_id, "pairs": [asdict(pair) for pair in pairs]}

    async def forget(self, tenant: Tenant | None) -> Mapping[str, Any]:
        """See ``Operations``. Stores delete a tenant's label, or the roots of all models that are served.

        What was cached under a user or a salt of its own has another label: it is out of reach from now on, and ages
        out.

        Raises:
            InvalidRequest: Tenants are not kept apart.
        """
        if tenant is not None and self._parts.config.isolation == "none":
            raise InvalidRequest("isolation is none: no tenant's blocks are kept apart from another's")
        roots = {info.cache_root for info in self._parts.cluster.workers() if info.cache_root}
        stores, failed = 0, []
        for info in self._parts.cluster.workers():
            if info.role is not WorkerRole.STORE:
                continue
            client = StoreClient(info.address, token=self._token, worker=info.worker)
            try:
                if tenant is None:
                    for root in sorted(roots):
                        await client.delete_root(root, deadline_s=_STORE_S)
                else:
                    await client.delete_tenant(self._label(tenant), deadline_s=_STORE_S)
                stores += 1
            except ServiceError as error:
                failed.append({"store": info.worker, "error": error.code})
            finally:
                await client.close()
        return {"stores": stores, "failed": failed}

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
    }
