"""``epdserve demo-model``: writes the small official-format checkpoint that needs no download."""

from pathlib import Path

from epdserve.services.cli.errors import CommandError


def run(directory: Path) -> None:
    """Write the demo checkpoint into ``directory``.

    Raises:
        CommandError: The folder holds something else, or cannot be written.
    """
    from epdserve.model.demo.writer import write_demo_model
    from epdserve.model.errors import DemoModelError

    try:
        write_demo_model(directory)
    except DemoModelError as error:
        raise CommandError(str(error)) from error
    size_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    print(f"wrote {directory} ({size_bytes / 1e6:.1f} MB)")
