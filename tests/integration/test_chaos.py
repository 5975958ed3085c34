"""A short plan of misfortune on real processes; longer ones are commands (loadtest/chaos/README.md)."""

from pathlib import Path

from epdserve.loadtest.chaos.__main__ import perform
from epdserve.loadtest.chaos.plan import read_plan
from epdserve.model.demo.writer import write_demo_model
from support.repository import ROOT


def test_kills_a_hung_store_the_registry_s_loss_and_a_drain_are_not_seen_by_clients(tmp_path: Path) -> None:
    model_dir = write_demo_model(tmp_path / "model")
    run = perform(read_plan(ROOT / "loadtest/chaos/plans/short.toml"), tmp_path / "run", model_dir)
    assert run.verdict.problems == []
    assert len(run.asked) >= 10
