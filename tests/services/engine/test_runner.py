import numpy as np
import pytest
import torch
from epdserve.kernels.checksum import page_checksums_numpy
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader
from epdserve.kvstore.errors import OutOfPages
from epdserve.model.batch import Outputs
from epdserve.model.replay import PrefillSpan
from epdserve.services.engine.config import EngineSettings
from epdserve.services.engine.identity import CacheNames
from epdserve.services.engine.onboard import onboard
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import Part, Runner
from epdserve.services.engine.validation import RequestLimits
from epdserve.services.errors import InvalidRequest
from pydantic import ValidationError
from support.engine import BLOCK_TOKENS, TENANT, make_runner, prompt, settings
from support.golden import TINY


def request(tokens: np.ndarray, *, exact: bool = False) -> RunningRequest:
    nothing = PrefillSpan(first_row=0, publish_from=0, encoder_floor=0, decoder_from=0, decoder_floor=0)
    return RunningRequest("r", tokens, len(tokens), len(tokens), TENANT, exact, nothing)


def run_through(runner: Runner, running: RunningRequest) -> torch.Tensor:
    assert onboard(runner, running)
    return runner.run([Part(running, running.remaining_rows)])


def test_sealed_page_holds_its_header_and_the_checksum_of_its_payload() -> None:
    runner = make_runner()
    running = request(prompt(20))
    run_through(runner, running)
    layout = runner.layout
    assert running.sealed_blocks == 2
    for block in range(2):
        page = running.pages[block]
        info = runner.blocks.describe(page)
        data = runner.pools.pages[page].numpy()
        header = BlockHeader.decode(
            data[layout.header_offset : layout.header_offset + HEADER_BYTES].tobytes()
        )
        assert (header.block_hash, header.checksum, header.exact) == (info.block_hash, info.checksum, True)
        assert info.block_hash == running.hashes[block]
        twin = page_checksums_numpy(
            runner.pools.pages.numpy(), [page], layout.payload_bytes, [info.block_hash]
        )
        assert twin == [info.checksum]
    runner.release(running)
    runner.release(running)
    assert runner.leaked_pages() == 0


def test_equal_prompts_in_one_batch_share_one_copy() -> None:
    runner = make_runner()
    first, second = request(prompt(30)), request(prompt(30))
    assert onboard(runner, first)
    assert onboard(runner, second)
    exits = runner.run([Part(first, 30), Part(second, 30)])
    assert torch.equal(exits[0], exits[1])
    assert first.pages[:3] == second.pages[:3]
    assert runner.blocks.counts().filling == 2
    for running in (first, second):
        runner.release(running)
    assert runner.leaked_pages() == 0


def test_parts_without_output_give_no_row() -> None:
    runner = make_runner()
    first, second = request(prompt(30)), request(prompt(9, 1))
    assert onboard(runner, first)
    assert onboard(runner, second)
    assert len(runner.run([Part(first, 10, Outputs.NONE), Part(second, 9)])) == 1
    assert (first.next_row, first.remaining_rows, second.remaining_rows) == (10, 20, 0)


def test_request_without_room_changes_nothing() -> None:
    runner = make_runner(num_pages=4)
    first = request(prompt(24))
    run_through(runner, first)
    blocks, slots = runner.blocks.counts(), runner.state_slots.counts()
    assert not onboard(runner, request(prompt(20, 1)))
    assert not onboard(runner, request(np.concatenate([prompt(24), prompt(20, 1)])))
    assert (runner.blocks.counts(), runner.state_slots.counts()) == (blocks, slots)
    with pytest.raises(OutOfPages):
        runner.blocks.reserve(2)


def test_request_waits_for_a_state_slot() -> None:
    runner = make_runner(max_running=1)
    first, second = request(prompt(9)), request(prompt(9, 1))
    assert onboard(runner, first)
    assert not onboard(runner, second)
    runner.release(first)
    assert onboard(runner, second)


def test_leaks_are_counted() -> None:
    runner = make_runner()
    assert runner.leaked_pages() == 0
    running = request(prompt(20))
    run_through(runner, running)
    assert runner.leaked_pages() == 4  # three pages, one state slot


def test_names_differ_by_tenant_prefix_and_end() -> None:
    names = CacheNames(b"r" * 32, BLOCK_TOKENS)
    tokens = prompt(21)
    chain = names.chain(tokens, TENANT)
    assert len(chain) == 2
    tails = {
        names.tail(tokens, chain, TENANT),
        names.tail(tokens, chain, b"tenant-b"),
        names.tail(tokens[:20], chain, TENANT),
        names.tail(tokens[:16], chain, TENANT),
        names.tail(tokens[:7], [], TENANT),
        names.tail(prompt(21, 1), names.chain(prompt(21, 1), TENANT), TENANT),
    }
    assert len(tails) == 6
    assert all(len(tail) == 16 for tail in tails)


def test_root_depends_on_the_block_length() -> None:
    assert make_runner().names.root != make_runner(block_tokens=4).names.root
    assert make_runner().names.root == make_runner(num_pages=7).names.root


def test_requests_with_impossible_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt 0"):
        request(prompt(0))


def test_limits_come_from_pages_model_and_settings() -> None:
    assert RequestLimits.of(make_runner(), settings()).max_context_tokens == 96 * BLOCK_TOKENS
    limits = RequestLimits.of(make_runner(), settings(max_context_tokens=50))
    limits.check(prompt(40), TENANT, max_new_tokens=10)
    with pytest.raises(InvalidRequest, match="exceed the context of 50"):
        limits.check(prompt(40), TENANT, max_new_tokens=11)
    for key in (b"", b"x" * 65):
        with pytest.raises(InvalidRequest, match="tenant key"):
            limits.check(prompt(4), key, max_new_tokens=0)


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValidationError, match="staging_slots=2 < max_running=8"):
        settings(staging_slots=2)
    with pytest.raises(ValidationError):
        settings(block_tokens=7)
    with pytest.raises(ValidationError):
        settings(unknown=1)
    by_memory = EngineSettings(model_dir=TINY, pages_memory_bytes=10_000)
    assert by_memory.page_count(4096) == 2
    with pytest.raises(ValueError, match="no page of 20000"):
        by_memory.page_count(20_000)
