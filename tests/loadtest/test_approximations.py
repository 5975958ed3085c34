"""Prices of the approximations: nothing costs nothing, each way costs what it should, and figures become pictures."""

import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from epdserve.loadtest.approximations import WAYS, Price, RoundingBackbone, Way, prices
from epdserve.loadtest.approximations_plot import markdown, svg
from epdserve.model.demo.narrow import narrow_backbone, narrow_config
from epdserve.model.logits import LogitsPlan, LogitsRun
from support.golden import tiny

WINDOW, HIT, DECODED = 8, 32, 2


@pytest.fixture(scope="module")
def found() -> dict[str, Price]:
    text = np.random.default_rng(3).integers(3, 490, HIT + WINDOW + DECODED)
    return {
        price.way: price for price in prices(tiny("f32"), [text], [HIT], weights="random", decoded=DECODED)
    }


def test_every_way_is_priced(found: dict[str, Price]) -> None:
    assert list(found) == [way.name for way in WAYS]
    assert all(price.rows == WINDOW + DECODED for price in found.values())


def test_each_way_costs_something_and_all_of_it_most(found: dict[str, Price]) -> None:
    errors = {way: price.error for way, price in found.items()}
    assert all(0 < error < 1 for way, error in errors.items() if way != "FP4 index keys"), errors
    assert errors["all of it"] >= max(errors["FP4 main KV"], errors["FP8 window"])


def test_no_approximation_is_the_exact_forward_to_the_bit() -> None:
    text = np.random.default_rng(4).integers(3, 490, 40)
    exact = LogitsRun(tiny("f32"), text, LogitsPlan()).run()
    ours = LogitsRun(RoundingBackbone(tiny("f32"), Way("none")), text, LogitsPlan()).run()
    assert torch.equal(ours, exact)


def test_all_caches_rounded_is_what_packed_caches_hold() -> None:
    text = np.random.default_rng(5).integers(3, 490, 40)
    packed = LogitsRun(tiny("f32q"), text, LogitsPlan()).run()
    way = next(way for way in WAYS if way.name == "all caches rounded")
    ours = LogitsRun(RoundingBackbone(tiny("f32"), way), text, LogitsPlan()).run()
    assert torch.equal(ours, packed)


def test_table_and_plot(tmp_path: Path, found: dict[str, Price]) -> None:
    rows = [asdict(price) for price in found.values()]
    rows += [asdict(replace(price, hit=64)) for price in found.values()]
    assert markdown(rows).count("\n") == len(WAYS) + 1
    plot = ElementTree.fromstring(svg(rows))
    lines = plot.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == len(WAYS)


def test_the_narrow_model_has_the_released_plan() -> None:
    backbone = narrow_backbone()
    assert (backbone.plan.cut, len(backbone.plan.layers)) == (20, 40)
    assert narrow_config().text.sliding_window == 128
