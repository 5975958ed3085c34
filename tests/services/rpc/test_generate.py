from pathlib import Path

from epdserve.services.rpc.generate import PB_DIR, generate


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    names = generate(tmp_path)
    stale = [name for name in names if (tmp_path / name).read_text() != (PB_DIR / name).read_text()]
    assert stale == []
    left_over = {path.name for path in PB_DIR.iterdir() if path.is_file()} - {*names, "__init__.py"}
    assert left_over == set()
