import gzip
import itertools
import json
from pathlib import Path

import pytest
from epdserve.loadtest.kv_bench.replay import Disk, Pages, PlainLru, hit_ratio
from epdserve.loadtest.traces import BLOCK_TOKENS, TracedRequest, generate, read_mooncake


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [0, 2]},
        {"timestamp": 500, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
    ]
    file = tmp_path / "mooncake_small.jsonl.gz"
    with gzip.open(file, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    assert read_mooncake(file) == [TracedRequest(0.5, 1024, (0, 1), 5), TracedRequest(2.0, 600, (0, 2), 5)]


def test_made_up_conversations_grow_share_heads_and_repeat_themselves() -> None:
    requests = generate(3, conversations=40)
    assert requests == generate(3, conversations=40)
    assert requests != generate(4, conversations=40)
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(requests))
    assert all(
        (len(r.blocks) - 1) * BLOCK_TOKENS < r.prompt_tokens <= len(r.blocks) * BLOCK_TOKENS for r in requests
    )
    firsts = {request.blocks[0] for request in requests}
    assert 1 < len(firsts) <= 8


def ask(*blocks: int, at_s: float = 0.0) -> TracedRequest:
    return TracedRequest(at_s, len(blocks) * BLOCK_TOKENS, blocks)


@pytest.mark.parametrize(
    "access",
    [PlainLru(64).access, Pages(64).access, Disk(64, floor_s=0).access, Disk(64, floor_s=600).access],
    ids=["lru", "pages", "disk", "floor"],
)
def test_with_room_for_all_every_repeated_block_is_a_hit(access) -> None:  # type: ignore[no-untyped-def]
    assert hit_ratio([ask(1, 2, 3), ask(1, 2, 3, 4), ask(1, 2, 9)], access) == 5 / 10


def test_leaves_go_before_the_blocks_they_stand_on() -> None:
    """Where plain LRU drops the beginning of the oldest prompt, a chain loses its end and keeps its beginning."""
    requests = [ask(1, 2, 3, 4, at_s=0.0), ask(11, 12, at_s=1.0), ask(1, 2, 3, 4, at_s=2.0)]
    assert hit_ratio(requests, PlainLru(4).access) == 0
    assert hit_ratio(requests, Pages(4).access) == 2 / 10


def test_a_floor_keeps_what_is_there_and_refuses_what_comes() -> None:
    requests = [ask(*range(32), at_s=0.0), *(ask(*range(100 * n, 100 * n + 32), at_s=n) for n in range(1, 5))]
    again = [*requests, ask(*range(32), at_s=5.0)]
    assert hit_ratio(again, Disk(34, floor_s=600).access) == pytest.approx(32 / 192)
    assert hit_ratio(again, Disk(34, floor_s=0).access) == 0
