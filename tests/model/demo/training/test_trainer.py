"""Some steps of training on a small stage: it learns, it can be taken up, and its export is what serving computes."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from epdserve.model.backbone import Backbone
from epdserve.model.demo import shipped, writer
from epdserve.model.demo.training.export import export
from epdserve.model.demo.training.facts import Facts
from epdserve.model.demo.training.forward import TrainableBackbone
from epdserve.model.demo.training.rounding import as_stored
from epdserve.model.demo.training.scene import Scene, Setting
from epdserve.model.demo.training.schedule import SCHEDULE, Stage
from epdserve.model.demo.training.scores import Scores
from epdserve.model.demo.training.trainer import Trainer
from epdserve.model.demo.writer import write_trained_model
from epdserve.model.errors import DemoModelError
from epdserve.model.logits import LogitsPlan, LogitsRun
from epdserve.model.precision import Precision

STAGE = Stage(
    "some",
    4096,
    {"copy": 1.0, "recall": 1.0},
    ((64, 4, 1.0),),
    gaps=0.5,
    replays=0.5,
    rounds=True,
    sinkhorn_steps=3,
)


def trained(folder: Path, steps: int, stage: Stage = STAGE) -> Trainer:
    trainer = Trainer(folder, 5)
    trainer.begin(stage)
    scores = Scores()
    for _ in range(steps):
        trainer.run_step(stage, scores)
    return trainer


def same(first: Trainer, second: Trainer) -> bool:
    return all(torch.equal(value, second.weights[name]) for name, value in first.weights.items())


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    folder = tmp_path_factory.mktemp("state")
    trainer = trained(folder, 3)
    trainer.save()
    return folder, trainer


def test_every_tensor_but_the_indexers_moves(state: tuple[Path, Trainer]) -> None:
    _, trainer = state
    fresh = Trainer(Path("nowhere"), 5)
    still = {name for name, value in trainer.weights.items() if torch.equal(value, fresh.weights[name])}
    assert {name for name in still if ".indexer." not in name} == set()


def test_the_indexer_stage_moves_the_indexer_alone(tmp_path: Path, state: tuple[Path, Trainer]) -> None:
    lesson = Stage("lesson", 4096, {"recall": 1.0}, ((64, 2, 1.0),), indexer=True)
    fresh, trainer = Trainer(Path("nowhere"), 5), trained(tmp_path, 1, lesson)
    moved = {name for name, value in trainer.weights.items() if not torch.equal(value, fresh.weights[name])}
    assert moved
    assert all(".indexer." in name for name in moved)


def test_a_run_taken_up_equals_one_that_never_stopped(tmp_path: Path, state: tuple[Path, Trainer]) -> None:
    folder, _ = state
    assert same(trained(folder, 1), trained(tmp_path, 4))


def test_the_loss_falls(tmp_path: Path) -> None:
    trainer, stage = (
        Trainer(tmp_path, 5),
        Stage("copy", 16384, {"copy": 1.0}, ((64, 4, 1.0),), warm_steps=2, cool=0),
    )
    trainer.begin(stage)
    losses = []
    for _ in range(6):
        scores = Scores()
        trainer.run_step(stage, scores)
        losses.append(scores.loss["copy"] / scores.tokens["copy"])
    assert losses[-1] < losses[0] - 0.5


def test_the_export_is_served_as_it_was_trained(
    tmp_path: Path, state: tuple[Path, Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trainer = state
    export(folder, tmp_path / "trained.safetensors")
    monkeypatch.setattr(writer, "TRAINED_FILE", tmp_path / "trained.safetensors")
    monkeypatch.setattr(writer, "check_shipped", lambda definition: None)
    backbone = Backbone.load(write_trained_model(tmp_path / "model"), precision=Precision.F32)
    text = " ".join(Facts(random.Random(3), 40).sentences())  # no repetition: equal scores would be near ties
    ids = np.array(trainer.vocabulary.encode(text)[:96], dtype=np.int64)
    served = LogitsRun(backbone, ids, LogitsPlan()).run()
    model = TrainableBackbone(trainer.config, as_stored(trainer.config, trainer.weights), trainer.token_map_V)
    with torch.no_grad():
        scene = Scene(trainer.config.text, torch.from_numpy(ids)[None], Setting(selects=True))
        expected = model.logits(model.forward(scene))
    torch.testing.assert_close(served, expected, atol=1e-3, rtol=0)


def test_weights_of_another_tokenizer_are_refused(tmp_path: Path, state: tuple[Path, Trainer]) -> None:
    folder, trainer = state
    export(folder, tmp_path / "weights.safetensors")
    shipped.check_shipped(trainer.vocabulary.definition, tmp_path / "weights.safetensors")
    with pytest.raises(DemoModelError, match="another tokenizer"):
        shipped.check_shipped(trainer.vocabulary.definition + " ", tmp_path / "weights.safetensors")
    with pytest.raises(DemoModelError, match="no trained weights"):
        shipped.check_shipped(trainer.vocabulary.definition, tmp_path / "absent")


def test_an_export_without_a_state_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no state of training"):
        export(tmp_path, tmp_path / "x")


def test_stages_have_names_of_their_own() -> None:
    names = [stage.name for stage in SCHEDULE]
    assert len(set(names)) == len(names)


def test_the_command_shows_its_options() -> None:
    command = [sys.executable, "-P", "-m", "epdserve.model.demo.training", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "--seed" in run.stdout
