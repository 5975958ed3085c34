"""The command line against a server that is not ours: files, figures and the exit status."""

import json
from pathlib import Path

from epdserve.loadtest.command import app
from epdserve.loadtest.results.record import Results
from support.toy_openai import toy_server
from typer.testing import CliRunner


def test_a_run_leaves_its_results_and_a_page_and_two_runs_compare(tmp_path: Path) -> None:
    one, other, html = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "a.html"
    with toy_server(strict=True) as server:
        load = ["--url", server.url, "--plain", "--requests", "12", "--rate", "0", "--max-tokens", "4"]
        done = CliRunner().invoke(app, [*load, "--json", str(one), "--html", str(html)])
        assert done.exit_code == 0, done.output
        assert "12 in" in done.output
        again = CliRunner().invoke(app, [*load, "--seed", "2", "--json", str(other)])
        assert again.exit_code == 0, again.output
    assert "<svg" in html.read_text()
    assert len(Results.load(one).records) == 12
    compared = CliRunner().invoke(app, ["compare", str(one), str(other), "--json"])
    assert compared.exit_code == 0, compared.output
    assert {row["name"] for row in json.loads(compared.output)} >= {"TTFT p50, ms", "in time, share"}


def test_figures_on_standard_output_are_one_object_and_keys_are_not_among_them() -> None:
    with toy_server() as server:
        load = ["--url", server.url, "--plain", "--requests", "3", "--rate", "50", "--arrivals", "ramp"]
        done = CliRunner().invoke(app, [*load, "--api-key", "sk-very-secret", "--json", "-"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["requests"] == 3
    assert "very-secret" not in done.output


def test_a_refusal_fails_the_run_and_says_why() -> None:
    with toy_server(strict=True) as server:
        done = CliRunner().invoke(app, ["--url", server.url, "--requests", "2", "--rate", "0"])
    assert done.exit_code == 1
    assert "NOT AS EXPECTED" in done.output
    assert "unknown" in done.output


def test_no_server_and_no_such_workload_are_told_in_one_line() -> None:
    assert CliRunner().invoke(app, ["--url", "http://127.0.0.1:9"]).exit_code == 1
    with toy_server() as server:
        done = CliRunner().invoke(app, ["--url", server.url, "--workload", "none"])
    assert done.exit_code == 1
    assert CliRunner().invoke(app, ["compare", "no-file", "no-file"]).exit_code == 2
