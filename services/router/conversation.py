"""What the front ends that speak of messages have in common: threads, parsers, grammars, and how they are run."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from epdserve.services.router.answer_format import AnswerFormat
from epdserve.services.router.fields import Body
from epdserve.services.router.grammar import Calling, Expected, check_schema, grammar_for
from epdserve.services.router.options import Caller, Options, generation
from epdserve.services.router.parsing import OutputParser, ParserOptions
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.rendering import RenderedChat
from epdserve.services.router.request import GenerateRequest
from epdserve.services.router.serve import Asked, GenerationEndpoint, Shape
from epdserve.services.router.tokenizer import RouterTokenizer
from epdserve.services.router.tools import ToolPlan
from epdserve.services.sampling import Grammar

BodyT = TypeVar("BodyT", bound=Body)
ResultT = TypeVar("ResultT")

# Below this, parsing and rendering cost less than the way to a thread and back
_IN_THREAD_ABOVE_BYTES: Final = 32 * 1024
# Above this, few at a time: encoding takes a core, and some 250 times its bytes in memory
_HEAVY_ABOVE_BYTES: Final = 128 * 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversation that may run."""

    options: Options
    chat: RenderedChat
    grammar: Grammar | None = None


class ConversationEndpoint(GenerationEndpoint, Generic[BodyT]):
    """Messages in, a message out; a protocol says how they are read and how it is written."""

    @abstractmethod
    def prepare(self, raw: bytes) -> tuple[BodyT, Prepared]:
        """Read and render. Runs in any thread.

        Raises:
            InvalidRequest, ModelNotFound: As the message says; ``param`` names the field.
        """

    @abstractmethod
    def shape(self, body: BodyT, prepared: Prepared, request: GenerateRequest) -> Shape:
        """How the answer is written."""

    async def ask(self, raw: bytes, caller: Caller) -> Asked:
        """A checked request; see ``GenerationEndpoint``."""
        parts = self.parts
        body, prepared = await off_the_loop(parts, len(raw), lambda: self.prepare(raw))
        if unknown := body.unknown:
            parts.metrics.unknown_fields.inc(unknown)
        chat, options = prepared.chat, prepared.options
        request = generation(
            chat.tokens, options, parts, caller, effort=chat.effort, grammar=prepared.grammar
        )
        parsing = parser_options(options, parts)
        parsers = [OutputParser(chat, parts.tokenizer, parsing) for _ in range(options.n)]
        return Asked(options, [request], parsers, self.shape(body, prepared, request))


async def off_the_loop(parts: RouterParts, size: int, work: Callable[[], ResultT]) -> ResultT:
    """Do work in a thread if a body of ``size`` bytes makes it long; the tokenizer leaves Python's lock free."""
    if size > _HEAVY_ABOVE_BYTES:
        async with parts.heavy_renders:
            return await asyncio.to_thread(work)
    if size > _IN_THREAD_ABOVE_BYTES:
        return await asyncio.to_thread(work)
    return work()


def parser_options(options: Options, parts: RouterParts) -> ParserOptions:
    """How answers to these options are parsed here."""
    return ParserOptions(
        stops=options.stops,
        include_stop=options.include_stop,
        stop_in_reasoning=parts.config.stop_in_reasoning,
        stop_token_ids=options.stop_token_ids,
        parallel_calls=options.parallel_calls,
        unwrap_arguments=parts.config.unwrap_arguments,
    )


def expected_grammar(
    chat: RenderedChat, plan: ToolPlan, answer_format: AnswerFormat, tokenizer: RouterTokenizer
) -> Grammar | None:
    """The grammar of a rendered conversation's answer, None if anything goes.

    Raises:
        InvalidRequest: A schema that cannot be enforced.
    """
    if answer_format.schema is not None:
        check_schema(answer_format.schema, param="response_format")
    expected = Expected(
        answer_format, plan.calling, _functions(chat.schemas, plan), plan.several, chat.in_calls
    )
    stage = chat.parsing.thinking_initial_stage
    reasoning = stage is not None and stage.starts_in_reasoning()
    return grammar_for(
        expected,
        dsml_id=tokenizer.dsml_id,
        after_token=tokenizer.think_end_id if reasoning else None,
        read_tokens=chat.prefix_tokens,
    )


def _functions(
    schemas: Mapping[str, Mapping[str, Any]], plan: ToolPlan
) -> dict[str, Mapping[str, Any]] | None:
    """Schemas to enforce; a function that is not strict beside strict ones takes anything."""
    if not schemas:
        return None
    if plan.calling is not Calling.STRICT:
        return dict(schemas)
    return {name: schema if name in plan.strict else {} for name, schema in schemas.items()}
