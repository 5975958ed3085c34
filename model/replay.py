"""Bounded replay as integer arithmetic: which rows a prefill runs, and what they may see.

Replay narrows the sliding window only. Global KV is neither recomputed nor rewritten on replayed rows, and stays
visible in full (report section 3.2.2). No tensor appears in this file.
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

    @property
    def replayed_rows(self) -> int:
        """Rows that are run again although their global KV was found."""
        return self.publish_from - self.first_row


def usable_hit(
    cached_tokens: int, *, prompt_tokens: int, window: int, block_tokens: int, has_tail: bool
) -> int:
    """Tokens of a prefix hit that are worth using.

    At least one token is always computed, hits without a tail end on a block boundary, and a hit of at most one window
    without a tail would replay all of itself, so it counts as none.
    """
    hit = min(cached_tokens, prompt_tokens - 1)
    if has_tail:
        return hit
    hit -= hit % block_tokens
    return hit if hit > window else 0


def plan_prefill(
    *,
    prompt_tokens: int,
    hit_tokens: int,
    window: int,
    slack: int = 0,
    has_tail: bool = False,
    exact: bool = False,
) -> PrefillSpan:
    """Span of a prefill of ``prompt_tokens`` after a hit of ``hit_tokens``.

    Without a tail the last window before the hit is replayed (encoder replay). Layers above the cut run on the last
    ``window + slack`` rows of the *prompt* (decoder replay); ``exact`` runs them on all rows.

    Raises:
        ValueError: The hit leaves no token to compute, or an exact prefill was to start from a hit without a tail.
    """
    if not 0 <= hit_tokens < prompt_tokens:
        raise ValueError(f"hit of {hit_tokens} tokens in a prompt of {prompt_tokens}")
    if exact and hit_tokens and not has_tail:
        raise ValueError("an exact prefill cannot start from a hit without a tail")
    first_row = hit_tokens if has_tail else max(0, hit_tokens - window)
    encoder_floor = 0 if has_tail else first_row
    kept_from = prompt_tokens - window - slack
    if exact or kept_from <= first_row:
        return PrefillSpan(first_row, hit_tokens, encoder_floor, first_row, encoder_floor)
    return PrefillSpan(first_row, hit_tokens, encoder_floor, kept_from, kept_from)
