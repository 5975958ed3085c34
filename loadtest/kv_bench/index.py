"""Names of blocks and who holds them: hash chains, the block index, the page machine."""

import gc
import random
import tracemalloc
from hashlib import blake2b
from itertools import pairwise

import numpy as np
from epdserve.kvstore.block_index import BlockIndex
from epdserve.kvstore.blocks import BlockManager
from epdserve.kvstore.hashing import prefix_hash_chain
from epdserve.kvstore.types import BlockEvents, BlockHash, PageId
from epdserve.loadtest.kv_bench.row import Row, Rows, Target, times_s

_BLOCK_TOKENS = 128


def measure(*, prompt_tokens: int = 100_000, index_blocks: int = 200_000, rounds: int = 9) -> Rows:
    """All of them."""
    yield from _names(prompt_tokens, rounds)
    yield from _events(index_blocks, max(1, rounds // 3))
    yield _memory(index_blocks)
    yield from _pages(8192, rounds)


def _names(prompt_tokens: int, rounds: int) -> Rows:
    tokens = np.random.default_rng(0).integers(0, 129_280, prompt_tokens, np.int32)
    raw = tokens.astype("<u4").tobytes()
    size = 4 * _BLOCK_TOKENS
    pieces = [raw[at : at + size] for at in range(0, len(raw) - size + 1, size)]
    chain = prefix_hash_chain(tokens, block_tokens=_BLOCK_TOKENS, root=bytes(32), tenant_key=b"tenant")
    index = BlockIndex()
    for worker in range(8):  # each holds less than the one before
        index.load_snapshot(f"worker-{worker}", 0, chain[: len(chain) * (8 - worker) // 8])
    known = dict.fromkeys(chain, 0)
    floor_s, chain_s, dict_s, lookup_s = times_s(
        lambda: [blake2b(piece, digest_size=16).digest() for piece in pieces],
        lambda: prefix_hash_chain(tokens, block_tokens=_BLOCK_TOKENS, root=bytes(32), tenant_key=b"tenant"),
        lambda: [known[block_hash] for block_hash in chain],
        lambda: index.longest_prefix(chain),
        rounds=3 * rounds,
    )
    what = f"{prompt_tokens:,} tokens"
    yield Row(
        f"hash chain of {what}", 1e3 * chain_s, "ms", 1e3 * floor_s, "blake2b alone", Target(4, "value", True)
    )
    yield Row(
        f"longest prefix of {what}, 8 workers",
        1e3 * lookup_s,
        "ms",
        1e3 * dict_s,
        "as many dictionary lookups",
        Target(1, "value", True),
    )


def _hashes(count: int, seed: int) -> list[BlockHash]:
    joined = random.Random(seed).randbytes(16 * count)
    return [BlockHash(joined[16 * i : 16 * i + 16]) for i in range(count)]


def _events(count: int, rounds: int) -> Rows:
    """Half of the events add, half remove; two workers hold the same blocks."""
    hashes, step = _hashes(count // 4, 1), 64
    batches = [tuple(hashes[at : at + step]) for at in range(0, len(hashes), step)]

    def apply() -> None:
        index = BlockIndex()
        for worker in ("a", "b"):
            index.load_snapshot(worker, 0, ())
        for worker in ("a", "b"):
            seq = 0
            for batch in batches:
                index.apply(worker, BlockEvents(seq, added=batch))
                seq += len(batch)
            for batch in batches:
                index.apply(worker, BlockEvents(seq, removed=batch))
                seq += len(batch)

    def sets() -> None:
        for _ in "ab":
            held = set()
            for batch in batches:
                for block_hash in batch:
                    held.add(block_hash)
            for batch in batches:
                for block_hash in batch:
                    held.discard(block_hash)

    apply_s, sets_s = times_s(apply, sets, rounds=rounds)
    events = 4 * len(hashes)
    yield Row(
        f"block events applied, {step} a batch",
        events / apply_s,
        "events/s",
        events / sets_s,
        "a set for each worker",
        Target(300_000, "value"),
    )


def _memory(count: int) -> Row:
    """At the worst moment: just after the table has grown."""
    gc.collect()
    tracemalloc.start()
    try:
        index = BlockIndex()
        index.load_snapshot("a", 0, ())
        before, seq, worst = tracemalloc.get_traced_memory()[0], 0, 0.0
        for part in range(count // 1024):
            index.apply("a", BlockEvents(seq, added=tuple(_hashes(1024, part))))
            seq += 1024
            if seq > count // 4:
                worst = max(worst, (tracemalloc.get_traced_memory()[0] - before) / seq)
    finally:
        tracemalloc.stop()
    return Row("memory of the block index, worst", worst, "B an entry", target=Target(100, "value", True))


def _pages(count: int, rounds: int) -> Rows:
    chain = _hashes(count, 2)
    manager = BlockManager(count)
    pages: list[PageId] = []

    def reserve() -> None:
        pages[:] = manager.reserve(count)

    def seal() -> None:
        manager.seal(pages[0], chain[0], parent=None, exact=True, checksum=0)
        for page, (parent, block_hash) in zip(pages[1:], pairwise(chain), strict=True):
            manager.seal(page, block_hash, parent=parent, exact=True, checksum=0)

    def again() -> None:
        """A second set of names, so that the next ``reserve`` evicts and ``seal`` finds nothing."""
        chain[:] = [BlockHash(block_hash[1:] + block_hash[:1]) for block_hash in chain]

    reserve_s, seal_s, release_s, match_s, _, _ = times_s(
        reserve,
        seal,
        lambda: manager.release(pages),
        lambda: manager.match(chain, exact=False),
        lambda: manager.release(pages),
        again,
        rounds=rounds,
    )
    for what, seconds in (
        ("reserve, evicting all", reserve_s),
        ("seal", seal_s),
        ("match", match_s),
        ("release", release_s),
    ):
        yield Row(f"page machine: {what}", count / seconds, "blocks/s")
