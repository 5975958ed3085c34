"""Ahead-of-time compilations of the indexer kernels, with the bytes and FLOPs of the released model."""

from __future__ import annotations

from typing import Final

from epdserve.kernels.catalogue import INDEX_DIM, INDEX_HEADS, Entry, Work
from epdserve.kernels.indexer.score import BLOCK_ENTRIES, WARPS, score_blocks_kernel, score_pages_kernel
from epdserve.kernels.indexer.select import CHUNK, block_max_kernel, select_kernel, warps

_KEY_BYTES: Final = INDEX_DIM // 2 + INDEX_DIM // 32
_QUERY_BYTES: Final = INDEX_HEADS * (_KEY_BYTES + 4)
_FLOPS: Final = 2 * INDEX_HEADS * INDEX_DIM  # of one query and one key
_TOP: Final = 512
_POOL: Final = 2048 * 8  # entries
_LONG: Final = 1 << 20
_PAGES: Final = {
    "stride_table": "i32:16",
    "table_pages": "i32:16",
    "num_pages": "i32",
    "page_bytes": "i32:16",
    "values_offset": "i32:16",
    "scales_offset": "i32:16",
}
_QUERY: Final = {
    "q_ptr": "*u8",
    "q_scale_ptr": "*u8",
    "w_ptr": "*fp32",
    "pages_ptr": "*u8",
    "table_ptr": "*i64",
    "visible_ptr": "*i64",
    "out_ptr": "*fp32",
}
_SHAPE: Final = {"H": INDEX_HEADS, "D": INDEX_DIM, "PER_PAGE": 128, "BLOCK": BLOCK_ENTRIES}


def _scores(rows: int, entries: int, pairs: int) -> Work:
    return Work(
        f"T={rows}, E={entries}",
        entries * _KEY_BYTES + rows * _QUERY_BYTES + 4 * pairs,
        pairs * _FLOPS,
        "bf16",
    )


def _select(has_index: bool, work: tuple[Work, ...]) -> Entry:
    return Entry(
        name=f"top entries, {'later rounds' if has_index else 'first round'}",
        kernel=select_kernel,
        signature={
            "score_ptr": "*fp32",
            "index_ptr": "*i32" if has_index else "*fp32",
            "visible_ptr": "*i64",
            "out_score_ptr": "*fp32",
            "out_index_ptr": "*i64" if has_index else "*i32",
            "length": "i32:16",
            "stride_score": "i32:16",
            "stride_out": "i32:16",
            "k": "i32:16",
        },
        constexprs={"HAS_INDEX": has_index, "K_BLOCK": _TOP, "CHUNK": CHUNK},
        num_warps=warps(CHUNK),
        work=work,
    )


ENTRIES: Final = (
    Entry(
        name="index scores",
        kernel=score_pages_kernel,
        signature=_QUERY | _PAGES | {"tile_ptr": "*i32", "entries": "i32:16", "stride_out": "i32:16"},
        constexprs=_SHAPE,
        num_warps=WARPS,
        work=(
            _scores(8192, 8192, 8192 * 8193 // 2),
            _scores(1, _LONG, _LONG),
            Work(
                f"T=32, E={_LONG}",
                32 * (_LONG * (_KEY_BYTES + 4) + _QUERY_BYTES),
                32 * _LONG * _FLOPS,
                "bf16",
            ),
        ),
    ),
    Entry(
        name="candidate scores",
        kernel=score_blocks_kernel,
        signature=_QUERY
        | _PAGES
        | {"segment_ptr": "*i64", "blocks_ptr": "*i64", "slots": "i32:16", "stride_blocks": "i32:16"},
        constexprs=_SHAPE | {"BLOCK_SIZE": 8},
        num_warps=WARPS,
        work=(Work("T=32", 32 * (_POOL * (_KEY_BYTES + 4) + _QUERY_BYTES), 32 * _POOL * _FLOPS, "bf16"),),
    ),
    _select(
        False,
        (
            Work("T=8192, E=8192", 8192 * (2 * 8193 + 12 * _TOP), 8192 * 8193 * 32),
            Work(f"T=32, E={_LONG}", 32 * (4 * _LONG + 128 * 8 * _TOP), 32 * _LONG * 64),
        ),
    ),
    _select(True, (Work("T=32, 128 chunks", 32 * 128 * _TOP * 8, 32 * 128 * _TOP * 64),)),
    Entry(
        name="block max",
        kernel=block_max_kernel,
        signature={
            "score_ptr": "*fp32",
            "visible_ptr": "*i64",
            "out_ptr": "*fp32",
            "entries": "i32:16",
            "stride_score": "i32:16",
            "num_blocks": "i32:16",
        },
        constexprs={"BLOCK_SIZE": 8, "BLOCKS": 256},
        work=(Work(f"T=32, E={_LONG}", 32 * _LONG * 9 // 2, 32 * _LONG),),
    ),
)
