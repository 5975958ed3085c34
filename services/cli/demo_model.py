"""``epdserve demo-model``: writes the small official-format checkpoint that needs no download."""

from pathlib import Path

from epdserve.services.cli.errors import CommandError


def run(directory: Path, *, random_weights: bool = False) -> None:
    """Write the demo checkpoint into ``directory``.

    Args:
        random_weights: Leave the trained weights aside; so it is too where the package comes without them.

    Raises:
        CommandError: The folder holds something else, or cannot be written.
    """
    from epdserve.model.demo.shipped import TRAINED_FILE
    from epdserve.model.demo.writer import write_demo_model, write_trained_model
    from epdserve.model.errors import DemoModelError

    trained = TRAINED_FILE.exists() and not random_weights
    try:
        (write_trained_model if trained else write_demo_model)(directory)
    except DemoModelError as error:
        raise CommandError(str(error)) from error
    size_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    print(f"wrote {directory} ({size_bytes / 1e6:.1f} MB, {'trained' if trained else 'random'} weights)")
