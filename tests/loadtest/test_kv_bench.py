import json
from pathlib import Path

import pytest
from epdserve.loadtest.kv_bench import command, index, memory, recovery, ssd
from epdserve.loadtest.kv_bench.row import BLOCK_BYTES, PAYLOAD_BYTES, Row, Target, times_s
from typer import Typer
from typer.testing import CliRunner


def test_a_rate_is_held_against_its_floor_and_a_time_against_its_limit() -> None:
    rate = Row("copy", 4.0, "GB/s", 8.0, "memcpy", Target(0.5))
    assert (rate.ratio, rate.met) == (0.5, True)
    assert Row("copy", 3.9, "GB/s", 8.0, "memcpy", Target(0.5)).met is False
    assert Row("chain", 3.9, "ms", 1.0, "raw", Target(4, "value", at_most=True)).met is True
    assert Row("chain", 4.1, "ms", 1.0, "raw", Target(4, "value", at_most=True)).met is False
    assert Row("free", 1.0, "ms").met is None
    assert rate.cells() == ("copy", "4 GB/s", "8 (memcpy)", "0.50", ">= 0.5 of the floor: met")
    assert rate.as_json()["met"] is True


def test_works_take_turns_and_the_first_round_is_not_counted() -> None:
    seen: list[str] = []
    seconds = times_s(lambda: seen.append("a"), lambda: seen.append("b"), rounds=2)
    assert seen == ["a", "b"] * 3
    assert len(seconds) == 2


def test_the_block_is_that_of_the_released_model() -> None:
    assert PAYLOAD_BYTES == 128 * 890
    assert BLOCK_BYTES == -(-(PAYLOAD_BYTES + 64) // 4096) * 4096


def test_every_row_can_be_measured_small() -> None:
    rows = [
        *memory.measure(count=4, rounds=1),
        *index.measure(prompt_tokens=1000, index_blocks=5000, rounds=1),
    ]
    assert all(row.value > 0 for row in rows)
    assert len({row.name for row in rows}) == len(rows)


def test_ssd_rows_can_be_measured_small() -> None:
    rows = list(ssd.measure(counts=[8], rounds=1))
    assert all(row.value > 0 for row in rows)


def test_recovery_can_be_measured_small() -> None:
    rows = list(recovery.measure(gigabytes=0.01))
    assert [row.name.rpartition(" ")[2] for row in rows] == ["intact", "lost"]


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("copy", 1.0, "GB/s", 8.0, "memcpy", Target(0.5))]
    monkeypatch.setattr(command, "GROUPS", {"memory": lambda _: iter(rows)})
    app = Typer()
    app.command()(command.main)
    runner, file = CliRunner(), tmp_path / "rows.json"
    done = runner.invoke(app, ["--only", "memory", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "| copy | 1 GB/s | 8 (memcpy) | 0.12 | >= 0.5 of the floor: MISSED |" in done.output
    assert json.loads(file.read_text())["rows"][0]["ratio"] == 0.125
    assert runner.invoke(app, ["--strict"]).exit_code == 1
    assert runner.invoke(app, ["--only", "nothing"]).exit_code == 2
