"""``epdserve logits``: logits of given token ids, through the batch, pages and replay code that serves."""

from dataclasses import dataclass
from pathlib import Path

from epdserve.services.cli.errors import CommandError

PRECISIONS = ("f32", "f32q", "bf16q", "native")


@dataclass(frozen=True, slots=True)
class LogitsOptions:
    """How the ids are run; the fields are those of ``epdserve.model.logits.LogitsPlan``."""

    precision: str
    prefill: int | None
    chunk: int | None
    encoder_hit: int
    decoder_replay: bool


def run(model_dir: Path, ids_file: Path, out_file: Path, options: LogitsOptions) -> None:
    """Write array ``logits`` [T, vocabulary] float32; rows that were not run are NaN.

    Raises:
        CommandError: A file is missing or wrong, or the options do not fit the ids.
    """
    if options.precision not in PRECISIONS:
        raise CommandError(f"--precision is one of {', '.join(PRECISIONS)}, not {options.precision!r}")
    for path in (model_dir / "config.json", ids_file):
        if not path.is_file():
            raise CommandError(f"there is no file {path}")
    if not out_file.absolute().parent.is_dir():
        raise CommandError(f"there is no folder {out_file.absolute().parent}")

    from epdserve.model import logits
    from epdserve.model.errors import ModelError
    from epdserve.model.precision import Precision
    from safetensors import SafetensorError

    plan = logits.LogitsPlan(
        prefill=options.prefill,
        chunk=options.chunk,
        encoder_hit=options.encoder_hit,
        decoder_replay=options.decoder_replay,
    )
    try:
        rows, vocabulary = logits.run(
            model_dir, ids_file, out_file, precision=Precision(options.precision), plan=plan
        )
    except (ValueError, OSError, ModelError, SafetensorError) as error:
        raise CommandError(str(error)) from error
    print(f"wrote {out_file}: logits [{rows}, {vocabulary}] float32")
