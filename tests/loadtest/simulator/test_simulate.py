"""The command: scenario files in, tables and a page out."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from epdserve.loadtest.simulator.planner import Planner
from epdserve.loadtest.simulator.run import Simulation
from epdserve.loadtest.simulator.scenario import ScenarioError, ScenarioFile, read_scenario
from epdserve.loadtest.simulator.sweep import sweep
from epdserve.loadtest.svg import Line, lines
from epdserve.services.cli.errors import CommandError
from epdserve.services.cli.simulate import SimulateOptions, run
from support.repository import ROOT

SMALL = """
name = '{name}'
policy = "{policy}"
loads = [0.8, 1.3]
seeds = [1, 2]
length = 0.1
[cluster]
prefills = 2
decodes = 1
"""


def scenario_file(folder: Path, *, name: str = "ours", policy: str = "epdserve", more: str = "") -> Path:
    path = folder / f"{policy}.toml"
    path.write_text(SMALL.format(name=name, policy=policy) + more)
    return path


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.sources: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "onerror")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_two_scenarios_make_tables_and_a_page_that_loads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "<img src=x onerror=alert(1)>"
    ours = scenario_file(tmp_path, more="[plan]\nrate = 4.0\nmax_decodes = 4\n")
    theirs = scenario_file(tmp_path, name=evil, policy="least tokens")
    run(SimulateOptions(ours, theirs, tmp_path / "report.html"))
    told = capsys.readouterr()
    assert "4/4 ours: load 1.3, seed 2" in told.err
    assert f"{evil} less ours, same seeds" in told.out
    assert "for 4.00 requests/s: " in told.out
    page = _Text()
    page.feed((tmp_path / "report.html").read_text())
    assert page.sources == []
    assert "img" not in page.tags
    assert page.tags >= {"svg", "table", "polyline", "polygon", "rect"}
    for words in ("Goodput over load", "TTFT", "TPOT", "by tier", "by tenant", "Effort granted", evil):
        assert words in page.text


def test_the_same_file_gives_the_same_page(tmp_path: Path) -> None:
    path = scenario_file(tmp_path)
    for name in ("one", "two"):
        run(SimulateOptions(path, None, tmp_path / name))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_every_load_and_seed_is_run(tmp_path: Path) -> None:
    scenario = read_scenario(scenario_file(tmp_path))
    points = sweep(scenario)
    assert [(point.load, point.seed) for point in points] == [(0.8, 1), (0.8, 2), (1.3, 1), (1.3, 2)]
    assert all(
        sum(point.efforts.values()) > 0 and list(point.ttft_s) == sorted(point.ttft_s) for point in points
    )


def test_the_plan_is_the_smallest_cluster_that_is_enough() -> None:
    scenario = ScenarioFile.model_validate(
        {"seeds": [1], "length": 0.1, "policy": "least tokens", "plan": {"rate": 60.0, "max_prefills": 16}}
    )
    found = Planner(scenario).plan()
    assert found.best is not None
    tried = {(one.prefills, one.decodes): one for one in found.trials}
    smaller = [one for (p, d), one in tried.items() if p <= found.best.prefills and d < found.best.decodes]
    assert found.best.enough
    assert found.best.prefills > 1
    assert not any(one.enough for one in smaller)


def test_a_plan_that_nothing_fulfils_says_so() -> None:
    plan = {"rate": 500.0, "max_prefills": 1, "max_decodes": 1}
    scenario = ScenarioFile.model_validate({"seeds": [1], "length": 0.05, "plan": plan})
    assert Planner(scenario).plan().best is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shape = 'x'", "shape must be one of conversation"),
        ("policy = 'x'", "policy must be one of round robin"),
        ("loads = []", "loads"),
        ("loads = [-1.0]", "loads.0"),
        ("loads = [nan]", "loads.0"),
        ("seed = 1", "seed: Extra inputs"),
        ("[cluster]\ngpu = 'H1'", "cluster.gpu must be one of"),
        ("[cluster]\nprefills = 0", "cluster.prefills"),
        ("trace = 'missing.gz'", "no trace at"),
        ("[[faults]]\nrole='prefill'\nworker=9\nat_s=0.0\nuntil_s=1.0\nslowness=2.0", "names no worker"),
        ("[[faults]]\nrole='prefill'\nworker=0\nat_s=2.0\nuntil_s=1.0\nslowness=2.0", "ends before"),
        ("loads = [", "no TOML"),
    ],
)
def test_impossible_files_are_refused_by_place(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=r".") as refusal:
        read_scenario(path)
    assert words in str(refusal.value)
    with pytest.raises(CommandError):
        run(SimulateOptions(path))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot read"):
        run(SimulateOptions(tmp_path / "none.toml"))


def test_the_scenarios_that_ship_are_valid() -> None:
    found = sorted((ROOT / "deploy/scenarios").glob("*.toml"))
    assert found
    for path in found:
        assert read_scenario(path).loads


def test_a_plot_of_nothing_is_an_empty_frame() -> None:
    assert "<svg" in lines("none", "x", "y", [])
    assert "polyline" in lines("one", "x", "y", [Line("a", [1.0], [0.0])])


def test_faults_of_a_file_happen(tmp_path: Path) -> None:
    death = '[[faults]]\nrole = "prefill"\nworker = 0\nat_s = 0.5\nuntil_s = 60.0\ndies = true\n'
    file = read_scenario(scenario_file(tmp_path, more=death))
    (fault,) = file.spec().faults
    assert (fault.role, fault.worker, fault.dies, file.spec().lease_s) == ("prefill", 0, True, 5.0)
    run = Simulation(file.spec(), file.make_policy(1), file.workload(8.0, 1)).run()
    assert any(job is not None and job.retries for job in run.jobs)
