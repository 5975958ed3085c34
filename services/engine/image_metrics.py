"""Metrics of images: the embedding cache, the tower, and what prefill workers fetch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


class EmbeddingMetrics:
    """Of a process with a vision encoder."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self.lookups = Counter(
            "epdserve_embedding_lookups_total",
            "Images looked up in the embedding cache.",
            ["outcome"],  # hit, joined (being made for another request), miss, absent (only looked up)
            registry=registry,
        )
        self.evictions = Counter(
            "epdserve_embedding_evictions_total", "Images evicted for room.", registry=registry
        )
        self.refused = Counter(
            "epdserve_embedding_refusals_total",
            "Images that everything in use left no room for.",
            registry=registry,
        )
        self.failures = Counter(
            "epdserve_encode_failures_total", "Images that were not embedded.", ["reason"], registry=registry
        )
        self.patches = Counter(
            "epdserve_encode_patches_total", "Patches run through the vision encoder.", registry=registry
        )
        self.batch_images = Histogram(
            "epdserve_encode_batch_images",
            "Images of one batch.",
            registry=registry,
            buckets=(1, 2, 4, 8, 16, 32),
        )
        self.stage_seconds = Histogram(
            "epdserve_encode_stage_seconds",
            "Time of images and batches by stage.",
            ["stage"],  # pixels, queue, tower
            registry=registry,
            buckets=_SECONDS,
        )
        self._gauges = (
            Gauge("epdserve_embedding_cache_bytes", "Bytes of slots that hold images.", registry=registry),
            Gauge("epdserve_embedding_cache_pinned", "Images that are being read.", registry=registry),
            Gauge("epdserve_encode_queued_patches", "Patches that wait for the tower.", registry=registry),
        )

    @classmethod
    def unregistered(cls) -> EmbeddingMetrics:
        """For tests."""
        return cls(None)

    def watch(
        self,
        *,
        held_bytes: Callable[[], float],
        pinned: Callable[[], float],
        queued_patches: Callable[[], float],
    ) -> None:
        """Read the gauges from here on every scrape."""
        for gauge, read in zip(self._gauges, (held_bytes, pinned, queued_patches), strict=True):
            gauge.set_function(read)


class ImageFetchMetrics:
    """Of a prefill worker."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self.fetches = Counter(
            "epdserve_image_fetches_total",
            "Embeddings fetched for prompts.",
            [
                "outcome"
            ],  # pulled, recent (pulled before), local, cached (no row of it is run), or an error's code
            registry=registry,
        )
        self.bytes = Counter(
            "epdserve_image_fetch_bytes_total", "Bytes of embeddings pulled.", registry=registry
        )
        self.seconds = Histogram(
            "epdserve_image_fetch_seconds", "From the wish to the bytes.", registry=registry, buckets=_SECONDS
        )
        self._recent = Gauge(
            "epdserve_image_recent_bytes",
            "Bytes of pulled embeddings kept for other prompts.",
            registry=registry,
        )

    def watch(self, *, recent_bytes: Callable[[], float]) -> None:
        """Read the gauge from here on every scrape."""
        self._recent.set_function(recent_bytes)
