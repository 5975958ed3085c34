"""``epdserve demo-model``: writes the small official-format checkpoint that needs no download."""

from pathlib import Path

from epdserve.services.cli.errors import CommandError


def run(directory: Path) -> None:
    """Write the demo checkpoint into ``directory``.

    Raises:
        CommandError: The folder holds something else, or cannot be written.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CommandError(f"{directory} exists and is not an empty folder; name another or remove it")
    from epdserve.model.demo.writer import write_demo_model

    try:
        write_demo_model(directory)
    except OSError as error:
        raise CommandError(f"cannot write the demo model to {directory}: {error.strerror}") from error
    size_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    print(f"wrote {directory} ({size_bytes / 1e6:.1f} MB)")
