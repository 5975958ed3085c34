"""A generation as the router runs it: nothing after this knows HTTP, nothing before it knows workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

from epdserve.kvstore.hashing import ImageDigest
from epdserve.services.image_types import PlacedImage
from epdserve.services.policy.gate import SloClass
from epdserve.services.router.images.pictures import PromptImage
from epdserve.services.sampling import Grammar, SamplingParams
from epdserve.services.types import DecodeReceipt, Effort, PrefillResult, TokenIds

# Of requests that are not the router's own
USUAL_SLO: Final = SloClass("interactive", 2.0, 0.05)

now = perf_counter  # seconds; an event loop's own clock may tick in whole milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What is to be generated.

    Attributes:
        deadline_at: Event loop time at which all of it must be over.
        effort: None if the request does not think; a scheduling signal, the prompt already says it.
        trace: W3C traceparent, empty if none.
        n: Choices that share one prefill; choice ``i`` draws as a request of its own with the seed ``seed + i``.
        prompt_logprobs: Alternatives told with each prompt token; such a request is ``exact``.
        tail_at: Where the next turn's prompt is likely to leave this one.
        keep_tail: The next turn is likely to begin with all of this one.
        images: Of the prompt, in order.
        deterministic: Its answer's bits do not depend on what the caches hold, nor on which of equal workers run it.
        received_at: By ``now``, 0 = not known.
        tenant: Whose share of the workers it takes from.
        slo: What it is promised; ``slo_asked`` if it said so itself.
        priority: Higher goes first.
        effort_asked: What it asked for, if it was granted less. ``effort_floor``: the lowest effort it takes instead of
            a 429.
        tools, turn: Of the conversation; they tell something about the answer's length.
    """

    request_id: str
    tokens: TokenIds
    tenant_key: bytes
    sampling: SamplingParams
    deadline_at: float
    exact: bool = False
    effort: Effort | None = None
    trace: str = ""
    n: int = 1
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    tail_at: int | None = None
    keep_tail: bool = True
    images: tuple[PromptImage, ...] = ()
    received_at: float = 0.0
    tenant: str = ""
    slo: SloClass = USUAL_SLO
    slo_asked: bool = False
    priority: int = 0
    effort_asked: Effort | None = None
    effort_floor: Effort | None = None
    tools: bool = False
    turn: int = 1
    deterministic: bool = False

    @property
    def image_digests(self) -> tuple[ImageDigest, ...]:
        """What the names of blocks take up."""
        return tuple(
            ImageDigest(image.first_token, image.tokens, image.picture.digest) for image in self.images
        )

    @property
    def placed_images(self) -> tuple[PlacedImage, ...]:
        """Where the images stand, for a worker that needs no embeddings."""
        return tuple(
            PlacedImage(image.first_token, image.tokens, image.picture.digest) for image in self.images
        )


@dataclass(slots=True)
class Trail:
    """What happened to one choice of a request on its way: for usage, receipts and metrics. Written by the pipeline.

    Times are those of ``now``, 0 = not reached.

    Attributes:
        waited_s: Time in which a worker was at it, RPC included; the rest is the router's own.
        drawn: All ids of the answer so far.
        charged_tokens: Of prompt and answer, all choices, for the tenant's limit.
        handovers: How often a worker that drains sent it elsewhere, before or after the first token.
        root: Of the blocks of the first attempt's workers.
        prefill: Result of the first prefill; a resumed request has had others, counted in ``resumes``.
    """

    received_at: float
    body_at: float = 0.0
    placed_at: float = 0.0
    prefilled_at: float = 0.0
    first_token_at: float = 0.0
    waited_s: float = 0.0
    root: bytes = b""
    prefill_worker: str = ""
    decode_worker: str = ""
    prefill: PrefillResult | None = None
    decode: DecodeReceipt | None = None
    retries: int = 0
    resumes: int = 0
    handovers: int = 0
    charged_tokens: int = 0
    drawn: list[int] = field(default_factory=list)
    lost_workers: list[str] = field(default_factory=list)

    def waiting(self) -> Waiting:
        """Around an await on a worker."""
        return Waiting(self)

    @property
    def cached_tokens(self) -> int:
        """Hit length of the prompt."""
        return 0 if self.prefill is None else self.prefill.cached_tokens


class Waiting:
    """Adds the time until its block ends to a trail's ``waited_s``."""

    __slots__ = ("_began_at", "_trail")

    def __init__(self, trail: Trail) -> None:
        self._trail = trail

    def __enter__(self) -> None:
        self._began_at = now()

    def __exit__(self, *_: object) -> None:
        self._trail.waited_s += now() - self._began_at
