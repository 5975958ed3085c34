"""Writes the Grafana dashboards: ``python deploy/dashboards.py [--check]``. Panels are rows of a table here.

Five boards in helm/epdserve/files/dashboards: what users see (Overview), workers (Pools), where KV lies (KV tiers), what
the router decides (Router), machines and processes (Node). They read plain Prometheus and the recording rules.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parents[1] / "helm" / "epdserve" / "files" / "dashboards"
WIDTH, HEIGHT = 8, 7  # three panels a row of Grafana's 24 columns
RATE: Final = "[$__rate_interval]"
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
OK: Final = 'outcome!~"invalid_request|unauthenticated|model_not_found|payload_too_large|cancelled"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        queries: PromQL and the legend of its series.
        unit: Grafana's name of it.
        kind: timeseries, stat, bargauge or heatmap.
    """

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""


def rate(metric: str, by: str = "", labels: str = "") -> str:
    """Of a counter, a second, summed."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{labels}{RATE}))"


def quantiles(metric: str, by: str = "", labels: str = "") -> list[tuple[str, str]]:
    """Median, 95th and 99th percentile of a histogram."""
    group = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return [
        (
            f"histogram_quantile({q}, sum by ({group}) (rate({metric}_bucket{labels}{RATE})))",
            f"p{int(q * 100)}{legend}",
        )
        for q in (0.5, 0.95, 0.99)
    ]


def mean(metric: str, by: str) -> str:
    """Mean of a histogram's observations."""
    return f"{rate(metric + '_sum', by)} / ({rate(metric + '_count', by)} > 0)"


def seldom(query: str) -> str:
    """0 where there has been none of it yet."""
    return f"({query}) or vector(0)"


TTFT, ITL = "epdserve_router_time_to_first_token_seconds", "epdserve_router_inter_token_seconds"
OVERVIEW: Final = [
    Panel("Requests a second", [(rate("epdserve_router_requests_total", "outcome"), "{{outcome}}")], "reqps"),
    Panel(
        "Goodput: first token within 2.5 s",
        [(rate(f"{TTFT}_bucket", labels='{le="2.5"}'), "within"), (rate(f"{TTFT}_count"), "all")],
        "reqps",
    ),
    Panel("Requests in flight", [("sum(epdserve_router_in_flight_requests)", "in flight")]),
    Panel("Time to first token", quantiles(TTFT), "s"),
    Panel("Time between tokens", quantiles(ITL), "s"),
    Panel("Time of a request", quantiles("epdserve_router_request_seconds"), "s"),
    Panel(
        "Faults, of what the service is to blame for",
        [(f'sum(rate(epdserve_router_requests_total{{outcome=~"internal|unavailable|deadline_exceeded"}}{RATE})) / (sum(rate(epdserve_router_requests_total{{{OK}}}{RATE})) > 0)', "faults")],
        "percentunit",
    ),
    Panel(
        "Error budget left of this range (99.9 %)",
        [(f'1 - (sum(increase(epdserve_router_requests_total{{outcome=~"internal|unavailable|deadline_exceeded"}}[$__range])) / (sum(increase(epdserve_router_requests_total{{{OK}}}[$__range])) > 0)) / 0.001', "left")],
        "percentunit",
        "stat",
    ),
    Panel(
        "Tokens a second",
        [(rate("epdserve_router_prompt_tokens_total"), "prompt"), (rate("epdserve_router_cached_tokens_total"), "of these cached"), (rate("epdserve_router_completion_tokens_total"), "sampled"), (rate("epdserve_router_reasoning_tokens_total"), "of these reasoning")],
    ),
    Panel("Streams that went on elsewhere, prefills repeated", [(rate("epdserve_router_resumes_total"), "resumed"), (rate("epdserve_router_retries_total"), "repeated")], "ops"),
    Panel("Workers", [("sum by (role, state) (epdserve_router_workers)", "{{role}} {{state}}")], "short", "bargauge"),
    Panel("Recorded: faults of the last 5 minutes, late first tokens", [("epdserve:faults:ratio_rate5m", "faults"), ("epdserve:slow_first_tokens:ratio_rate5m", "late")], "percentunit"),
]  # fmt: skip

POOLS: Final = [
    Panel("Running requests", [("sum by (instance) (epdserve_engine_running_requests)", "{{instance}}")]),
    Panel("Waiting requests", [("sum by (instance) (epdserve_engine_waiting_requests)", "{{instance}}")]),
    Panel("Age of the oldest in a queue", [("max by (instance) (epdserve_engine_oldest_waiting_seconds)", "{{instance}}")], "s"),
    Panel("Steps a second", [(rate("epdserve_engine_step_seconds_count", "instance"), "{{instance}}")], "ops"),
    Panel("Time of a step", quantiles("epdserve_engine_step_seconds", "instance"), "s"),
    Panel("Age of the running step", [("max by (instance) (epdserve_engine_step_age_seconds)", "{{instance}}")], "s"),
    Panel("Rows a second", [(rate("epdserve_engine_rows_total", "kind"), "{{kind}}")]),
    Panel("Time by stage", [(mean("epdserve_engine_stage_seconds", "stage"), "{{stage}}")], "s"),
    Panel("Requests that ended", [(rate("epdserve_engine_requests_total", "outcome"), "{{outcome}}")], "ops"),
    Panel("Hand-offs", [(rate("epdserve_engine_handoffs_total", "outcome"), "{{outcome}}")], "ops"),
    Panel("Preemptions", [(seldom(rate("epdserve_engine_preemptions_total", "how")), "{{how}}")], "ops"),
    Panel("Images: cache and patches", [(seldom(rate("epdserve_embedding_lookups_total", "outcome")), "{{outcome}}"), (rate("epdserve_encode_patches_total"), "patches")], "ops"),
    Panel("Frames and tokens of the decode streams", [(rate("epdserve_rpc_decode_frames_total"), "frames"), (rate("epdserve_rpc_decode_tokens_total"), "tokens")], "ops"),
    Panel("Grammars", [(rate("epdserve_grammar_cache_total", "outcome"), "{{outcome}}")], "ops"),
    Panel("Pages leaked or in no phase: 0, or a bug", [("sum by (instance) (epdserve_engine_leaked_pages)", "leaked {{instance}}"), ("sum by (instance) (epdserve_kvstore_pages_missing)", "missing {{instance}}")]),
]  # fmt: skip

KV: Final = [
    Panel("Prompt tokens by where their KV came from", [(rate("epdserve_router_prefix_tokens_total", "source"), "{{source}}")]),
    Panel("Hits by tier", [
        (rate("epdserve_kvstore_page_cache_blocks_total", "result"), "pages {{result}}"),
        (rate("epdserve_kvstore_host_cache_blocks_total", "result"), "host {{result}}"),
        (seldom(rate("epdserve_kvstore_ssd_blocks_total", "result")), "ssd {{result}}"),
        (seldom(rate("epdserve_kvstore_tails_total", "result")), "tails {{result}}"),
    ], "ops"),
    Panel("Share of prompt tokens from a cache", [(f"{rate('epdserve_router_cached_tokens_total')} / ({rate('epdserve_router_prompt_tokens_total')} > 0)", "cached")], "percentunit"),
    Panel("Bytes held", [("sum(epdserve_kvstore_page_cache_bytes)", "pages"), ("sum(epdserve_kvstore_host_cache_bytes)", "host cache"), ("sum(epdserve_kvstore_tail_bytes)", "tails"), ("sum(epdserve_kvstore_ssd_live_bytes)", "ssd")], "bytes"),
    Panel("SSD: live of allocated", [("sum by (instance) (epdserve_kvstore_ssd_live_bytes) / (sum by (instance) (epdserve_kvstore_ssd_allocated_bytes) > 0)", "{{instance}}")], "percentunit"),
    Panel("Age up to which the SSD tier keeps blocks", [("min by (instance) (epdserve_kvstore_ssd_achieved_age_seconds)", "{{instance}}"), ("vector(259200)", "72 h")], "s"),
    Panel("Evictions by reason", [
        (seldom(rate("epdserve_kvstore_page_cache_evictions_total", "reason")), "pages {{reason}}"),
        (seldom(rate("epdserve_kvstore_host_cache_evictions_total", "reason")), "host {{reason}}"),
        (seldom(rate("epdserve_kvstore_ssd_evictions_total", "reason")), "ssd {{reason}}"),
        (seldom(rate("epdserve_kvstore_tail_evictions_total", "reason")), "tails {{reason}}"),
    ], "ops"),
    Panel("Blocks offered to the SSD tier", [(rate("epdserve_kvstore_ssd_puts_total", "result"), "{{result}}")], "ops"),
    Panel("SSD bytes a second", [(rate("epdserve_kvstore_ssd_written_bytes_total"), "written"), (rate("epdserve_kvstore_ssd_read_bytes_total"), "read")], "Bps"),
    Panel("SSD queue", [("sum by (instance) (epdserve_kvstore_ssd_queue_blocks)", "blocks {{instance}}"), ("max by (instance) (epdserve_kvstore_ssd_queue_oldest_seconds)", "oldest, s {{instance}}")]),
    Panel("Violations of the floor, I/O errors, failed drives", [(rate("epdserve_kvstore_ssd_retention_violations_total"), "violations"), (seldom(rate("epdserve_kvstore_ssd_io_errors_total", "operation")), "errors {{operation}}"), ('sum(epdserve_kvstore_ssd_directories{state="failed"})', "failed drives")]),
    Panel("Blocks offered to the store", [(rate("epdserve_store_offloaded_blocks_total", "result"), "{{result}}")], "ops"),
    Panel("Blocks lent by the store", [(seldom(rate("epdserve_store_fetched_blocks_total", "tier")), "{{tier}}")], "ops"),
    Panel("Pages by phase", [("sum by (phase) (epdserve_kvstore_pages)", "{{phase}}")]),
    Panel("Transfers", [(rate("epdserve_kvstore_transfer_bytes_total"), "bytes a second")], "Bps"),
    Panel("Time of a transfer", quantiles("epdserve_kvstore_transfer_seconds"), "s"),
    Panel("Leases", [("sum by (instance) (epdserve_kvstore_leases)", "{{instance}}")]),
    Panel("Slots of pools", [("sum by (pool, state) (epdserve_kvstore_slots)", "{{pool}} {{state}}")]),
]  # fmt: skip

ROUTER: Final = [
    Panel("Effort, mean", [(mean("epdserve_router_effort_asked", "job"), "asked"), (mean("epdserve_router_effort_granted", "job"), "granted")]),
    Panel("Effort granted", [("sum by (le) (increase(epdserve_router_effort_granted_bucket[$__rate_interval]))", "{{le}}")], "short", "heatmap"),
    Panel("Let in at their effort floor", [(rate("epdserve_router_efforts_lowered_total"), "lowered")], "ops"),
    Panel("Refused early", [(seldom(rate("epdserve_router_refused_early_total", "reason")), "{{reason}}")], "ops"),
    Panel("Refused by a tenant's limit", [(rate("epdserve_router_tenant_refusals_total", "limit"), "{{limit}}")], "ops"),
    Panel("What the router adds before the prefill", quantiles("epdserve_router_prepare_seconds"), "s"),
    Panel("Queue age, the oldest of all workers", [("max(epdserve_engine_oldest_waiting_seconds)", "oldest")], "s"),
    Panel("Length forecast: share inside the 80 % interval", [("avg(epdserve_router_length_coverage_ratio)", "inside"), ("vector(0.8)", "meant")], "percentunit"),
    Panel("Length forecast: bias in octaves", [("avg(epdserve_router_length_bias_octaves)", "bias")]),
    Panel("Prompts with fewer hits than expected", [("max by (instance) (epdserve_router_misroute_ratio)", "misroutes {{instance}}"), ("max by (instance) (epdserve_router_index_stale_ratio)", "stale tokens {{instance}}")], "percentunit"),
    Panel("Block index", [("sum(epdserve_router_block_index_blocks)", "blocks"), (rate("epdserve_router_block_index_events_total"), "news a second"), (rate("epdserve_router_block_index_drifts_total"), "drifts a second")]),
    Panel("Parts of earlier answers in prompts", [(seldom(rate("epdserve_router_turns_total", "memo")), "{{memo}}")], "ops"),
    Panel("Prompt length", quantiles("epdserve_router_prompt_size_tokens")),
    Panel("Writes to streams", [(rate("epdserve_router_stream_events_total"), "events")], "ops"),
    Panel("Since the registry answered", [("max by (instance) (epdserve_router_registry_age_seconds)", "{{instance}}")], "s"),
    Panel("Tenants", [("max(epdserve_router_tenants)", "with keys"), ("max(epdserve_router_metered_tenants)", "metered")]),
    Panel("Decode streams opened again", [(rate("epdserve_router_decode_reconnects_total"), "reconnects")], "ops"),
    Panel("Answers without content, calls without JSON", [(rate("epdserve_router_empty_answers_total"), "empty"), (rate("epdserve_router_invalid_calls_total"), "invalid calls")], "ops"),
]  # fmt: skip

NODE: Final = [
    Panel("Processor of each process", [(rate("process_cpu_seconds_total", "instance"), "{{instance}}")], "short"),
    Panel("Resident memory of each process", [("sum by (instance) (process_resident_memory_bytes)", "{{instance}}")], "bytes"),
    Panel("Open files of each process", [("sum by (instance) (process_open_fds)", "{{instance}}")]),
    Panel("Garbage collections", [(rate("python_gc_collections_total", "generation"), "generation {{generation}}")], "ops"),
    Panel("Uptime", [("time() - process_start_time_seconds", "{{instance}}")], "s"),
    Panel("Processor of the machine", [('1 - avg by (instance) (rate(node_cpu_seconds_total{mode="idle"}[$__rate_interval]))', "{{instance}}")], "percentunit"),
    Panel("Memory of the machine", [("node_memory_MemAvailable_bytes", "available {{instance}}"), ("node_memory_MemTotal_bytes", "all {{instance}}")], "bytes"),
    Panel("Load", [("node_load1", "{{instance}}")]),
    Panel("Disk bytes", [(rate("node_disk_read_bytes_total", "device"), "{{device}} read"), (rate("node_disk_written_bytes_total", "device"), "{{device}} written")], "Bps"),
    Panel("Space of file systems", [('node_filesystem_avail_bytes{fstype!~"tmpfs|overlay|ramfs"}', "{{mountpoint}}")], "bytes"),
    Panel("Network", [(rate("node_network_receive_bytes_total", "device"), "{{device}} in"), (rate("node_network_transmit_bytes_total", "device"), "{{device}} out")], "Bps"),
    Panel("Days until the certificate ends", [(seldom("(min(epdserve_router_tls_cert_expiry_timestamp_seconds) - time()) / 86400"), "days")], "d", "stat"),
]  # fmt: skip

BOARDS: Final = {
    "overview": ("Overview", OVERVIEW),
    "pools": ("Pools", POOLS),
    "kv-tiers": ("KV tiers", KV),
    "router": ("Router", ROUTER),
    "node": ("Node", NODE),
}


def board(uid: str, title: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """Grafana's JSON of one dashboard."""
    return {
        "uid": f"epdserve-{uid}",
        "title": f"epdserve / {title}",
        "tags": ["epdserve"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "tags": ["epdserve"], "asDropdown": True, "title": "epdserve"}],
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}]
        },
        "panels": list(_panels(panels)),
    }


def _panels(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    for number, panel in enumerate(panels):
        columns = 24 // WIDTH
        yield {
            "id": number + 1,
            "title": panel.title,
            "type": panel.kind,
            "datasource": SOURCE,
            "gridPos": {
                "x": number % columns * WIDTH,
                "y": number // columns * HEIGHT,
                "w": WIDTH,
                "h": HEIGHT,
            },
            "fieldConfig": {
                "defaults": {"unit": panel.unit, "min": 0 if panel.unit == "percentunit" else None},
                "overrides": [],
            },
            "options": {"legend": {"displayMode": "list", "placement": "bottom"}}
            if panel.kind == "timeseries"
            else {},
            "targets": [
                {"refId": chr(65 + place), "datasource": SOURCE, "expr": query, "legendFormat": legend}
                for place, (query, legend) in enumerate(panel.queries)
            ],
        }


def files() -> dict[Path, str]:
    """What is to stand in each file."""
    return {
        FOLDER / f"{uid}.json": json.dumps(board(uid, title, panels), indent=1) + "\n"
        for uid, (title, panels) in BOARDS.items()
    }


def main(arguments: list[str]) -> int:
    """Write them, or compare them."""
    if "--check" in arguments:
        stale = [
            file.name for file, text in files().items() if not file.is_file() or file.read_text() != text
        ]
        print(f"stale: {stale}" if stale else "fresh")
        return int(bool(stale))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, text in files().items():
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
