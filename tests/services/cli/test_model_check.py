import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from epdserve.services.cli import up
from epdserve.services.cli.demo_model import run as write_demo
from epdserve.services.cli.errors import CommandError
from epdserve.services.cli.model_check import check_model

SHARD = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "demo"
    write_demo(folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def refused(model: Path) -> str:
    with pytest.raises(CommandError) as error:
        check_model(model)
    assert len(str(error.value).splitlines()) == 1
    assert str(model) in str(error.value)
    return str(error.value)


def test_the_demo_model_passes_without_torch(whole: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from epdserve.services.cli.model_check import check_model;"
        f"check_model(Path({str(whole)!r})); print('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "False"


def test_a_config_that_is_no_json_is_named(model: Path) -> None:
    (model / "config.json").write_text("{")
    assert "config.json" in refused(model)


def test_the_first_problem_of_a_config_is_told_and_the_others_are_counted(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["text_config"] |= {"hidden_size": -1, "vocab_size": "many"}
    (model / "config.json").write_text(json.dumps(config))
    message = refused(model)
    assert "text_config.vocab_size" in message
    assert "(and 1 more)" in message


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"], ids=["absent", "cut", "list", "empty"])
def test_a_tokenizer_that_is_none_is_named(model: Path, text: str | None) -> None:
    file = model / "tokenizer.json"
    file.unlink()
    if text is not None:
        file.write_text(text)
    assert "tokenizer.json" in refused(model)


@pytest.mark.parametrize("keep", [0, 4, 100, -1], ids=["empty", "in length", "in header", "in data"])
def test_a_cut_shard_is_named(model: Path, keep: int) -> None:
    for shard in model.glob("*.safetensors"):
        cut(shard, keep)
    assert SHARD.partition(".")[0] in refused(model)


def test_weights_of_another_model_are_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] *= 2
    (model / "config.json").write_text(json.dumps(config))
    message = refused(model)
    assert "weights: shape: layers.0.ffn" in message
    assert "more)" in message


def test_up_refuses_a_broken_model_before_it_starts_anything(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        pytest.fail("something was started")

    monkeypatch.setattr(up, "_run_machine", start)
    cut(model / SHARD, -1)
    options = up.UpOptions(
        port=0,
        model=model,
        config=None,
        state_dir=tmp_path / "state",
        demo_model_dir=tmp_path / "x",
        check=False,
    )
    with pytest.raises(CommandError, match="cannot be served"):
        up.run(options)
    assert not (tmp_path / "state").exists()
