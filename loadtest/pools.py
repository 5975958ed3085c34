"""What a server's workers hold, read from their ``/metrics`` as any operator would."""

import re
from collections.abc import Mapping
from typing import Any, Final

import httpx

_SAMPLE: Final = re.compile(r"^((?:epdserve|process)_\S+) (\S+)$", re.MULTILINE)
# Zero as soon as nobody uses anything; quarantined places wait for a transfer and are counted apart.
BUSY: Final = (
    'epdserve_kvstore_pages{phase="filling"}',
    'epdserve_kvstore_pages{phase="sealed"}',
    'epdserve_kvstore_slots{pool="state",state="held"}',
    'epdserve_kvstore_slots{pool="staging",state="held"}',
    "epdserve_kvstore_leases",
    "epdserve_engine_running_requests",
    "epdserve_engine_waiting_requests",
    "epdserve_engine_preparing_requests",
    "epdserve_store_fetches_running",
)
# Never other than zero, whatever is going on; and what is a leak once nobody uses anything.
MISSING: Final = ("epdserve_kvstore_pages_missing", "epdserve_kvstore_ssd_slots_missing")
LEAKED: Final = "epdserve_engine_leaked_pages"

Samples = Mapping[str, float]


def parse(page: str) -> dict[str, float]:
    """Samples of a metrics page by name with labels."""
    return {name: float(value) for name, value in _SAMPLE.findall(page)}


def busy(samples: Samples) -> dict[str, float]:
    """What is in use of the pools of one process; empty when nothing is."""
    return {name: samples[name] for name in BUSY if samples.get(name)}


def addresses(server: Mapping[str, Any]) -> dict[str, str]:
    """Metrics address of each worker of a server, from what ``up`` says about itself."""
    return {str(worker["worker"]): str(worker["metrics_address"]) for worker in server["workers"]}


async def read(client: httpx.AsyncClient, address: str) -> dict[str, float]:
    """Samples of one process.

    Raises:
        httpx.HTTPError: It does not answer.
    """
    answer = await client.get(f"http://{address}/metrics")
    answer.raise_for_status()
    return parse(answer.text)
