"""The model and its memory in one worker: builds batches, runs them, seals what fills.

Knows neither prefill nor decode: both hand in requests with the number of rows to run, and read exit vectors.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from epdserve.kernels.checksum import page_checksums
from epdserve.kvstore.block_header import HEADER_BYTES, encode_header
from epdserve.kvstore.blocks import BlockManager, Seal
from epdserve.kvstore.clock import Clock
from epdserve.kvstore.hashing import cache_root
from epdserve.kvstore.metrics import BlockMetrics
from epdserve.kvstore.slots import Slot, SlotPool
from epdserve.kvstore.types import HOST_MEMORY, BlockHash, MemoryRegion, PageId
from epdserve.model.backbone import Backbone
from epdserve.model.batch import Outputs
from epdserve.model.decode_graphs import DecodeGraphs
from epdserve.model.errors import ForwardStopped
from epdserve.model.pools import KVPools, aligned_bytes
from epdserve.model.replay import CanonicalCuts, Halo
from epdserve.model.tail import TailLayout, read_tail, write_tail
from epdserve.services.engine.ahead import BatchAhead
from epdserve.services.engine.backend import backend_bits
from epdserve.services.engine.config import EngineSettings
from epdserve.services.engine.identity import CacheNames
from epdserve.services.engine.requests import RunningRequest, TokenArray
from epdserve.services.types import TailRef

PAGES: Final = "pages"  # names of the registered regions, the same on every worker
TAILS: Final = "tails"


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one request in the next step."""

    request: RunningRequest
    rows: int
    outputs: Outputs = Outputs.LAST


class Filled(NamedTuple):
    """What a complete block is sealed with."""

    checksum: int
    exact: bool


class Runner:
    """Backbone, pools and page bookkeeping of one worker.

    Owned by the step loop and not thread-safe, but for what the block manager and the slot pools allow by themselves:
    leases, transfers and metrics reach those from other threads.

    Attributes:
        blocks: Pages of global KV.
        ahead: Lays out batches, the next one while a device runs this one.
        graphs: Decode steps as captured graphs, where there are any; a step of decode rows runs as one.
        cuts: Of deterministic prefills.
        names, deterministic_names: What blocks are called; those of deterministic requests are a world of their own.
        state_slots: One for each request in the batch.
        on_sealed: Told (request, first block, end) of blocks that were filled and sealed here, in the step loop.
        staging_slots: Places of ``staging``, (slots, tail bytes) uint8 host memory that peers read and pulls fill.
    """

    def __init__(
        self,
        backbone: Backbone,
        settings: EngineSettings,
        *,
        clock: Clock,
        block_metrics: BlockMetrics | None = None,
    ) -> None:
        self.backbone, self.clock = backbone, clock
        self.layout = backbone.layout(settings.block_tokens)
        self.window: int = backbone.config.text.sliding_window
        self.slack = settings.window_slack_tokens
        layers, cut = backbone.config.text.num_hidden_layers, backbone.plan.cut
        self.halo = Halo.of(window=self.window, layers=layers, cut=cut)
        self.tail_layout = TailLayout.of(backbone.config, self.layout)
        num_pages = settings.page_count(self.layout.page_bytes)
        self.pools = KVPools(
            backbone.config,
            self.layout,
            num_pages=num_pages,
            num_slots=settings.max_running,
            device=backbone.device,
        )
        self.blocks = BlockManager(num_pages, clock, metrics=block_metrics)
        self.on_sealed: Callable[[RunningRequest, int, int], None] | None = None
        self.state_slots = SlotPool(settings.max_running)
        self.staging = aligned_bytes((settings.staging_slots, self.tail_layout.nbytes))
        self.staging_slots = SlotPool(settings.staging_slots)
        every = -(-settings.deterministic_cut_tokens // settings.block_tokens) * settings.block_tokens
        self.cuts = CanonicalCuts(every, self.window, self.slack)
        self.names = self._names(backbone.device.type, deterministic=False)
        bits = f"{backend_bits(backbone.device)}; cuts {every}; slack {self.slack}"
        self.deterministic_names = self._names(bits, deterministic=True)
        self.ahead = BatchAhead(backbone.batch_shape(self.layout), backbone.device)
        self.graphs = DecodeGraphs.of(backbone, self.pools, most_rows=settings.max_running)

    def _names(self, backend: str, *, deterministic: bool) -> CacheNames:
        backbone = self.backbone
        root = cache_root(
            backbone.weights_fingerprint,
            self.layout.fingerprint(),
            backbone.precision.value,
            backend,
            deterministic=deterministic,
        )
        return CacheNames(root, self.layout.block_tokens)

    def names_of(self, request: RunningRequest) -> CacheNames:
        """How the blocks of a request are named."""
        return self.names if request.cuts is None else self.deterministic_names

    @property
    def num_pages(self) -> int:
        """Pages of the device."""
        return self.pools.num_pages

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.layout.block_tokens

    def regions(self) -> tuple[MemoryRegion, MemoryRegion]:
        """Memory that peers may read and pulls may fill: pages and staged tails."""
        device = self.backbone.device
        device_id = HOST_MEMORY if device.type == "cpu" else device.index or 0
        pages, staging = self.pools.pages, self.staging
        return (
            MemoryRegion(PAGES, pages.data_ptr(), self.layout.page_bytes, len(pages), device_id),
            MemoryRegion(TAILS, staging.data_ptr(), self.tail_layout.nbytes, len(staging)),
        )

    def run(
        self,
        parts: Sequence[Part],
        *,
        unwanted: Callable[[], bool] | None = None,
        then: Callable[[], Sequence[Part]] = tuple,
    ) -> torch.Tensor:
        """One forward step over ``parts``; their requests advance and blocks that filled are sealed.

        Args:
            unwanted: Asked before each layer, or before a graph, whether nobody wants any of it any more; quick.
            then: Parts that will probably be next; asked once these have advanced, while a device runs the step.

        Returns:
            (R, hidden) float32 exit vectors of the parts with an output, in order.

        Raises:
            ForwardStopped: ``unwanted`` said so. No request has advanced; what they hold is good for nothing.
        """
        segments = [part.request.segment(part.rows, part.outputs) for part in parts]
        if unwanted is not None and unwanted():
            raise ForwardStopped("nobody wants this step any more")
        exit_RD = self.graphs.forward(segments) if self.graphs is not None else None
        if exit_RD is None:
            exit_RD = self.backbone.forward(self.ahead.batch(segments), self.pools, unwanted=unwanted)
        for part in parts:
            part.request.next_row += part.rows
            part.request.go_on()
        if self.ahead.useful:
            self.ahead.foresee([part.request.segment(part.rows, part.outputs) for part in then()])
        self.seal_filled(part.request for part in parts)  # waits for the device: it needs checksums
        return exit_RD

    def seal_filled(self, requests: Iterable[RunningRequest]) -> None:
        """Seal every block that the requests have filled: checksum, header into the page, prefix index."""
        ready: list[tuple[RunningRequest, slice]] = []
        pages: list[PageId] = []
        hashes: list[BlockHash] = []
        for request in requests:
            full = request.shareable_tokens // self.block_tokens
            if full > request.sealed_blocks:
                self.extend_hashes(request, full)
                blocks = slice(request.sealed_blocks, full)
                ready.append((request, blocks))
                pages += request.pages[blocks]
                hashes += request.hashes[blocks]
        if not ready:
            return
        checksums = self.checksums(pages, hashes)
        exact = [
            request.is_exact((block + 1) * self.block_tokens)
            for request, blocks in ready
            for block in range(blocks.start, blocks.stop)
        ]
        filled = list(map(Filled, checksums, exact))
        self._write_headers(pages, hashes, filled)
        for request, blocks in ready:
            count = blocks.stop - blocks.start
            self.seal_next(request, filled[:count])
            del filled[:count]
            if self.on_sealed is not None:
                self.on_sealed(request, blocks.start, blocks.stop)

    def checksums(self, pages: Sequence[PageId], hashes: Sequence[BlockHash]) -> list[int]:
        """Checksum of each page's payload, seeded with its hash; may be called from other threads."""
        return page_checksums(self.pools.pages, pages, self.layout.payload_bytes, hashes)

    def extend_hashes(self, request: RunningRequest, blocks: int) -> None:
        """Make sure that the hashes of the first ``blocks`` blocks are known."""
        if len(request.hashes) < blocks:
            request.hashes = self.chain_of(request)

    def chain_of(self, request: RunningRequest) -> list[BlockHash]:
        """Hash of every full block of a request's known tokens."""
        return self.names_of(request).chain(request.known, request.tenant_key, request.image_digests)

    def tail_name(self, request: RunningRequest, tokens: TokenArray) -> bytes:
        """Identity of the tail after ``tokens``, the first of a request whose hashes are known so far."""
        names = self.names_of(request)
        return names.tail(tokens, request.hashes, request.tenant_key, request.image_digests)

    def seal_next(self, request: RunningRequest, filled: Sequence[Filled]) -> None:
        """Make a request's next complete pages shareable; a page that holds the same block may take its place."""
        start = request.sealed_blocks
        end = start + len(filled)
        places = zip(request.pages[start:end], request.hashes[start:end], filled, strict=True)
        request.pages[start:end] = self.blocks.seal_chain(
            [Seal(page, block_hash, checksum, exact) for page, block_hash, (checksum, exact) in places],
            parent=request.hashes[start - 1] if start else None,
        )
        request.sealed_blocks = end

    def holds_other_bytes(self, block_hash: BlockHash, checksum: int) -> bool:
        """Whether a page holds this block with another checksum: replayed prefills differ in their last bits."""
        pages = self.blocks.match([block_hash], exact=False)
        differs = any(self.blocks.describe(page).checksum != checksum for page in pages)
        self.blocks.release(pages)
        return differs

    def _write_headers(
        self, pages: Sequence[PageId], hashes: Sequence[BlockHash], filled: Sequence[Filled]
    ) -> None:
        payload_bytes, at = self.layout.payload_bytes, self.layout.header_offset
        headers = b"".join(
            encode_header(block_hash, checksum, payload_bytes, exact=exact)
            for block_hash, (checksum, exact) in zip(hashes, filled, strict=True)
        )
        rows_RB = torch.frombuffer(bytearray(headers), dtype=torch.uint8).view(-1, HEADER_BYTES)
        places = torch.tensor(pages, device=self.pools.pages.device)
        self.pools.pages[places, at : at + HEADER_BYTES] = rows_RB.to(places.device)

    def stage_tail(self, request: RunningRequest, staging: Slot, exit_D: torch.Tensor | None) -> TailRef:
        """Write the tail of a request that stands at ``next_row`` into a staging slot."""
        checksum = self.write_tail(request, self.staging[staging.index], exit_D)
        exact = request.is_exact(request.next_row)
        return TailRef(staging.index, staging.generation, self.tail_layout.nbytes, checksum, exact)

    def write_tail(self, request: RunningRequest, record_B: torch.Tensor, exit_D: torch.Tensor | None) -> int:
        """Write the tail of a request that stands at ``next_row``; returns its checksum."""
        assert request.slot is not None
        tokens = request.tokens[: request.next_row]
        self.extend_hashes(request, len(tokens) // self.block_tokens)
        return write_tail(
            record_B,
            self.tail_layout,
            self.pools,
            slot=request.slot.index,
            page=self.open_page(request),
            tokens=tokens,
            exit_D=exit_D,
            exact=request.is_exact(request.next_row),
            identity=self.tail_name(request, tokens),
        )

    def restore_tail(
        self,
        request: RunningRequest,
        record_B: torch.Tensor,
        *,
        checksum: int,
        exact: bool,
        has_exit: bool = False,
    ) -> torch.Tensor | None:
        """Put a request that has its slot and pages where the tail after its first ``next_row`` tokens left off.

        Returns:
            (hidden,) float32 exit vector of the last row if it was promised.

        Raises:
            TailError: The record is not the promised one. Nothing was written.
        """
        assert request.slot is not None
        tokens = request.tokens[: request.next_row]
        self.extend_hashes(request, len(tokens) // self.block_tokens)
        return read_tail(
            record_B,
            self.tail_layout,
            self.pools,
            slot=request.slot.index,
            page=self.open_page(request),
            tokens=tokens,
            identity=self.tail_name(request, tokens),
            checksum=checksum,
            has_exit=has_exit,
            exact=exact,
        )

    def open_page(self, request: RunningRequest) -> PageId | None:
        """Page of the block that ``next_row`` stands in; None on a block boundary."""
        block, offset = divmod(request.next_row, self.block_tokens)
        return request.pages[block] if offset else None

    def release(self, request: RunningRequest) -> None:
        """Give back a request's pages and state slot; doing it again changes nothing."""
        self.blocks.release(request.pages[: request.sealed_blocks])
        self.blocks.abort(request.pages[request.sealed_blocks :])
        request.pages, request.sealed_blocks = [], 0
        if request.slot is not None:
            self.state_slots.release(request.slot)
            request.slot = None

    def leaked_pages(self) -> int:
        """Pages and slots that are held although no request is here; 0 unless something was forgotten.

        Meaningful while the worker is idle and no lease is open. Quarantined places are not counted.

        Raises:
            ConservationError: The books themselves do not add up.
        """
        self.blocks.check()
        pages = self.blocks.counts()
        held = pages.filling + pages.sealed
        for pool in (self.state_slots, self.staging_slots):
            pool.check()
            held += pool.counts().held
        return held
