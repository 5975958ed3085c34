"""Errors of the model package.

ModelError
  ConfigError        config.json cannot be served; names every problem
  WeightError
    WeightFileError  a shard is absent, unreadable, or holds values that are not finite
    WeightMapError   names, shapes or dtypes differ from what the config asks for
  TokenizerError     the tokenizer or the compressed token map cannot be used
  TailError          a tail record is not the promised one
  DemoModelError     the demo model cannot be written here
  ForwardStopped     a step that nobody wants any more ended in its middle
  ImageError         bytes that are no image, or a damaged one
    ImageTooLarge    an image beyond a limit
"""

from collections.abc import Sequence


class ModelError(Exception):
    """Root of the errors this package raises on purpose."""


class _ListedError(ModelError):
    """An error that names all problems at once, so that one run is enough to see them."""

    def __init__(self, subject: str, problems: Sequence[str]) -> None:
        super().__init__("\n  - ".join([f"{subject}: {len(problems)} problem(s)", *problems]))
        self.problems = tuple(problems)


class ConfigError(_ListedError):
    """config.json is malformed, inconsistent, or asks for something this code does not do."""


class WeightError(ModelError):
    """Root of what can go wrong while weights are read."""


class WeightFileError(WeightError):
    """A weight file is absent, unreadable, changed while being read, or holds NaN."""


class WeightMapError(WeightError, _ListedError):
    """Tensors in the files differ from the tensors the config asks for."""


class TokenizerError(ModelError):
    """A tokenizer file or token map is unusable, or text or ids lie outside of it."""


class DemoModelError(ModelError):
    """The demo model would overwrite something that is not a demo model."""


class TailError(ModelError):
    """A tail record's bytes, identity, tokens or layout are not the expected ones."""


class ForwardStopped(ModelError):  # noqa: N818 - not an error of anybody
    """What the step has written so far is of no use to anybody."""


class ImageError(ModelError):
    """Bytes are no image of a kind that is taken, or a damaged one."""


class ImageTooLarge(ImageError):  # noqa: N818 - the name says what is wrong
    """An image exceeds a limit on bytes, pixels or frames."""
