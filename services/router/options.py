"""What a request asks for besides its prompt, in no protocol's words; and the request of the pipeline made of it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from epdserve.services.errors import InvalidRequest
from epdserve.services.router.auth import tenant_key
from epdserve.services.router.http_errors import ContextTooLong
from epdserve.services.router.images.pictures import PromptImage
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.request import GenerateRequest
from epdserve.services.router.slo import NO_WISH, SloWish, promised
from epdserve.services.sampling import Grammar, SamplingParams
from epdserve.services.types import MAX_READERS, Effort, TokenIds

MAX_COMPLETION_TOKENS: Final = 393_216
UINT64_MAX: Final = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A request's wishes; None = not said.

    Attributes:
        model: As the client named it; answers repeat it.
        n: Choices wanted.
        max_tokens: Lowered to what the context leaves if ``lower_max_tokens``, else refused beyond it.
        logprobs: Alternatives told with each token; None = nothing is told. ``prompt_logprobs`` alike.
        deadline_s: Taken if it is below the server's.
    """

    model: str
    stream: bool = False
    n: int = 1
    max_tokens: int | None = None
    lower_max_tokens: bool = False
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stops: Sequence[str] = ()
    include_stop: bool = False
    parallel_calls: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    user: str = ""
    cache_salt: str = ""
    exact: bool = False
    deterministic: bool = False
    receipt: bool = False
    deadline_s: float | None = None
    slo: SloWish = NO_WISH


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and how the request is called on other processes.

    Attributes:
        tenant: Whose share of the workers the request takes from.
        slo: What headers say of targets.
        received_at: By ``request.now``.
    """

    request_id: str
    key_name: str
    trace: str
    cache_epoch: str = ""
    tenant: str = ""
    slo: SloWish = NO_WISH
    received_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Thinking:
    """Efforts of a conversation, and what else of it tells how long its answer gets.

    Attributes:
        effort: Granted; None = does not think.
        asked: If another one was asked for.
        floor: The lowest that the client takes instead of a 429.
        turn: 1 for its first.
        name: Of the conversation.
    """

    effort: Effort | None = None
    asked: Effort | None = None
    floor: Effort | None = None
    tools: bool = False
    turn: int = 1
    name: bytes = b""


NO_THINKING: Final = Thinking()


def generation(
    tokens: TokenIds,
    options: Options,
    parts: RouterParts,
    caller: Caller,
    *,
    thinking: Thinking = NO_THINKING,
    grammar: Grammar | None = None,
    number: int | None = None,
    turns: bool = False,
    keep_tail: bool = True,
    images: Sequence[PromptImage] = (),
) -> GenerateRequest:
    """The pipeline's request; call it on the event loop.

    Args:
        number: Which one of several that a client's request becomes.
        turns: The prompt is a conversation, in which answers of ours come back.
        keep_tail: See ``GenerateRequest``.
        images: Likewise.

    Raises:
        ContextTooLong: Prompt and answer do not fit.
        InvalidRequest: A value that cannot be served.
    """
    _check_deterministic(options, thinking)
    config, wish = parts.config, options.slo.over(caller.slo)
    deadline_s = min(options.deadline_s or config.request_deadline_s, config.request_deadline_s)
    name = caller.request_id if number is None else f"{caller.request_id}-{number}"
    key = tenant_key(
        config.isolation,
        key_name=caller.key_name,
        user=options.user,
        cache_salt=options.cache_salt,
        epoch=caller.cache_epoch,
    )
    if turns and not options.deterministic:  # what the memo remembers depends on what was asked here before
        tokens, recalled = parts.memo.splice(key, tokens)
        for turn in recalled:
            parts.metrics.turns.labels(memo=turn.value).inc()
        if images and parts.pictures is not None:
            images = parts.pictures.relocate(tokens, images)  # answers before them may have other ids now
    thinks = turns and len(tokens) > 1 and tokens[-1] == parts.tokenizer.think_start_id
    return GenerateRequest(
        request_id=name,
        tokens=tokens,
        tenant_key=key,
        sampling=sampling_of(
            options,
            max_tokens=_max_tokens(options, len(tokens), parts),
            official=config.official_sampling,
            effort=thinking.effort,
        ),
        deadline_at=asyncio.get_running_loop().time() + deadline_s,
        # Every row of the prompt is run for its log-probabilities, which only exact requests do
        exact=options.exact or options.prompt_logprobs is not None,
        effort=thinking.effort,
        effort_asked=thinking.asked,
        effort_floor=thinking.floor,
        tools=thinking.tools,
        turn=thinking.turn,
        received_at=caller.received_at,
        tenant=caller.tenant,
        slo=promised(wish, config.slo),
        slo_asked=wish.asks,
        priority=-(wish.priority or 0),
        trace=caller.trace,
        n=options.n,
        grammar=grammar,
        prompt_logprobs=options.prompt_logprobs,
        # The next turn renders the end of reasoning where this one has its beginning
        tail_at=len(tokens) - 1 if thinks else None,
        keep_tail=keep_tail,
        images=tuple(images),
        deterministic=options.deterministic,
    )


def _check_deterministic(options: Options, thinking: Thinking) -> None:
    """Refuse what cannot go together with an answer that depends on nothing but the request.

    Raises:
        InvalidRequest: Which field it is, and why.
    """
    if not options.deterministic:
        return
    clashes = {
        "exact": (options.exact, "runs a halo where deterministic requests replay a window"),
        "prompt_logprobs": (options.prompt_logprobs is not None, "makes a request exact"),
        "effort_floor": (thinking.floor is not None, "lets the load of the moment choose the effort"),
    }
    for name, (asked, why) in clashes.items():
        if asked:
            raise InvalidRequest(
                f"deterministic does not go together with {name}, which {why}", param="deterministic"
            )


def check_choices(n: int, *, strict: bool) -> None:
    """Refuse more choices than one prefill can be read by.

    Raises:
        InvalidRequest: Too many, or more than one where the official service takes one.
    """
    if n > (1 if strict else MAX_READERS):
        limit = 1 if strict else MAX_READERS
        raise InvalidRequest(f"n must lie in 1..{limit}, got {n}", param="n")


def sampling_of(
    options: Options, *, max_tokens: int, official: bool = False, effort: Effort | None = None
) -> SamplingParams:
    """How tokens are drawn; a seed that was not given is random, or 0 if the answer must be deterministic.

    Args:
        official: Temperature and top_p as DeepSeek's service has them for this effort.
    """
    temperature = 1.0 if options.temperature is None else options.temperature
    top_p = 1.0 if options.top_p is None else options.top_p
    if official:
        temperature, top_p = _official(temperature, top_p, effort)
    seed = options.seed
    if seed is None:
        seed = 0 if options.deterministic else secrets.randbits(63)
    return SamplingParams(
        # The wire carries int64; the upper half of the unsigned range is its negative half
        seed=seed - 2**64 if seed >= 2**63 else seed,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        min_tokens=options.min_tokens,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=options.logit_bias,
        logprobs=options.logprobs,
    )


def _official(temperature: float, top_p: float, effort: Effort | None) -> tuple[float, float]:
    """What DeepSeek's service makes of temperature and top_p (spec 6.2)."""
    if effort is None:
        return temperature, 1.0
    return 1.0, max(0.95, top_p)


def _max_tokens(options: Options, prompt_tokens: int, parts: RouterParts) -> int:
    """Tokens the answer may take: what was asked for, else the rest of the context, capped if a cap is set."""
    context = context_tokens(parts)
    asked = options.max_tokens
    room = context - prompt_tokens
    if room < 1 or (asked is not None and asked > room and not options.lower_max_tokens):
        wish = "" if asked is None else f" and max_tokens {asked}"
        message = f"the context holds {context} tokens: {prompt_tokens} in the messages{wish} do not fit"
        raise ContextTooLong(message, param="messages" if room < 1 else "max_tokens")
    if asked is not None:
        return min(asked, room)
    return min(room, parts.config.max_completion_tokens or room)


def context_tokens(parts: RouterParts) -> int:
    """Tokens of prompt and answer together: the setting's, or what the workers hold if that is less."""
    served = parts.placer.max_context_tokens()
    context = parts.config.max_context_tokens
    return context if served is None else min(context, served)
