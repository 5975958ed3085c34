"""Bounded replay as integer arithmetic: which rows a prefill runs, and what they may see.

Replay narrows the sliding window only. Global KV is neither recomputed nor rewritten on replayed rows, and stays
visible in full (report section 3.2.2). An exact prefill runs a halo instead: so many more rows that whatever came out
narrowed is never looked at. No tensor appears in this file.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Rows of one prefill, in absolute token positions. Independent of how the rows are cut into chunks."""

    first_row: int  # rows [first_row, prompt_tokens) run through the causal encoder
    publish_from: int  # entries of tokens before it are cached already and are not written again
    encoder_floor: int  # window floor of the layers up to the cut
    decoder_from: int  # rows from here on also run above the cut
    decoder_floor: int  # window floor of the layers above the cut
    settled_from: int = 0  # window rows from here on are those that later rows may look at, in every layer
    end: int | None = None  # the next piece of a deterministic prefill begins here; None = all known tokens

    @property
    def replayed_rows(self) -> int:
        """Rows that are run again although their global KV was found."""
        return self.publish_from - self.first_row

    def resumes_at(self, position: int, window: int) -> bool:
        """Whether the state before row ``position`` serves a tail: what its row looks back at is settled."""
        return position >= self.publish_from and self.settled_from <= max(0, position - window + 1)


@dataclass(frozen=True, slots=True)
class Halo:
    """How far exactness travels: a row looks ``reach_tokens`` back in each layer.

    Rows narrowed by a floor are wrong in ever more rows from layer to layer. Counted back from a row whose output must
    be exact, ``layers * reach_tokens`` earlier rows are enough.
    """

    reach_tokens: int  # window - 1
    encoder_layers: int  # below the cut
    decoder_layers: int  # above the cut; the layer at the cut belongs to neither

    @classmethod
    def of(cls, *, window: int, layers: int, cut: int) -> "Halo":
        """Halo of a model with ``layers`` layers whose last KV source is layer ``cut``."""
        return cls(window - 1, cut, layers - 1 - cut)

    @property
    def encoder_tokens(self) -> int:
        """Rows before the first token whose global KV must be exact."""
        return self.encoder_layers * self.reach_tokens

    @property
    def decoder_tokens(self) -> int:
        """Decoder rows before one whose output must be exact, if what enters the layer above the cut is exact."""
        return self.decoder_layers * self.reach_tokens

    @property
    def total_tokens(self) -> int:
        """Rows before one whose output must be exact, through all layers."""
        return (self.encoder_layers + 1 + self.decoder_layers) * self.reach_tokens


@dataclass(frozen=True, slots=True)
class CanonicalCuts:
    """Where a deterministic prefill is cut into pieces, whatever the caches hold and however steps are cut.

    A piece begins as a prompt does after a hit without a tail: its window is replayed. So a hit that ends at a cut
    changes no bit of what follows, and a piece's global KV depends on the tokens before its end alone.
    """

    every_tokens: int
    window: int
    slack: int = 0

    def __post_init__(self) -> None:
        if self.every_tokens <= self.window:
            raise ValueError(f"cuts every {self.every_tokens} tokens, within a window of {self.window}")

    def last(self, prompt_tokens: int) -> int:
        """Where the last piece of a prompt begins: the longest hit that leaves a token to compute."""
        return (prompt_tokens - 1) // self.every_tokens * self.every_tokens

    def at_most(self, tokens: int, *, prompt_tokens: int) -> int:
        """The last cut within the first ``tokens`` tokens at which a prompt may go on."""
        return min(tokens // self.every_tokens * self.every_tokens, self.last(prompt_tokens))

    def span(self, cut: int, *, prompt_tokens: int) -> PrefillSpan:
        """The piece that begins at ``cut``. Only the last one runs rows above the model's cut layer."""
        if cut == self.last(prompt_tokens):
            return plan_prefill(
                prompt_tokens=prompt_tokens, hit_tokens=cut, window=self.window, slack=self.slack
            )
        first_row, end = max(0, cut - self.window), cut + self.every_tokens
        return PrefillSpan(first_row, cut, first_row, end, end, settled_from=prompt_tokens, end=end)


def usable_hit(
    cached_tokens: int,
    *,
    prompt_tokens: int,
    window: int,
    block_tokens: int,
    has_tail: bool,
    slack: int = 0,
    halo: Halo | None = None,
) -> int:
    """Tokens of a prefix hit that are worth using.

    At least one token is always computed, hits without a tail end on a block boundary, and a hit of at most one window
    without a tail would replay all of itself, so it counts as none; so does one of at most a halo, if one is given.
    """
    hit = min(cached_tokens, prompt_tokens - 1)
    if has_tail:
        return hit
    hit -= hit % block_tokens
    if halo is not None:
        return hit if _halo_from(halo, prompt_tokens, hit, slack) > 0 else 0
    return hit if hit > window else 0


def plan_prefill(
    *,
    prompt_tokens: int,
    hit_tokens: int,
    window: int,
    slack: int = 0,
    has_tail: bool = False,
    halo: Halo | None = None,
) -> PrefillSpan:
    """Span of a prefill of ``prompt_tokens`` after a hit of ``hit_tokens``.

    Without a tail the last window before the hit is replayed (encoder replay). Layers above the cut run on the last
    ``window + slack`` rows of the *prompt* (decoder replay). With a ``halo`` all results are those of a prefill that
    drops nothing and narrows nothing: the halo's rows are run instead, below and above the cut.

    Raises:
        ValueError: The hit leaves no token to compute.
    """
    if not 0 <= hit_tokens < prompt_tokens:
        raise ValueError(f"hit of {hit_tokens} tokens in a prompt of {prompt_tokens}")
    if has_tail or not hit_tokens:
        first_row = hit_tokens
    elif halo is None:
        first_row = max(0, hit_tokens - window)
    else:
        first_row = max(0, _halo_from(halo, prompt_tokens, hit_tokens, slack))
    encoder_floor = 0 if has_tail else first_row
    kept = window if halo is None else halo.decoder_tokens + 1
    kept_from = prompt_tokens - slack - kept
    decoder_from, decoder_floor = first_row, encoder_floor
    if kept_from > first_row:
        decoder_from = decoder_floor = kept_from
    settled_from = max(encoder_floor, decoder_floor)
    if halo is not None and settled_from:
        settled_from = prompt_tokens - window - slack
    return PrefillSpan(first_row, hit_tokens, encoder_floor, decoder_from, decoder_floor, settled_from)


def _halo_from(halo: Halo, prompt_tokens: int, hit_tokens: int, slack: int) -> int:
    """First row of an exact prefill after a hit without a tail; 0 or less: all of them.

    Global KV must be exact from the hit on, and the windows of every layer at the prompt's end.
    """
    return min(hit_tokens - halo.encoder_tokens, prompt_tokens - 1 - slack - halo.total_tokens)
