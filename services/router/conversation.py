"""What the front ends that speak of messages have in common: threads, parsers, grammars, and how they are run."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from epdserve.services.errors import InvalidRequest
from epdserve.services.grammar.tool_calls import Tool
from epdserve.services.router.answer_format import AnswerFormat
from epdserve.services.router.grammar import Calling, Expected, Markers, check_schema, grammar_for
from epdserve.services.router.grants import Granting
from epdserve.services.router.images.pictures import PromptImage
from epdserve.services.router.options import NO_THINKING, Caller, Options, Thinking, generation
from epdserve.services.router.parsing import OutputParser, ParserOptions
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.rendering import RenderedChat
from epdserve.services.router.request import GenerateRequest
from epdserve.services.router.serve import Asked, GenerationEndpoint, Shape
from epdserve.services.router.tokenizer import RouterTokenizer
from epdserve.services.router.tools import ToolPlan
from epdserve.services.sampling import Grammar

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
    answer_format: AnswerFormat
    grammar: Grammar | None = None
    thinking: Thinking = NO_THINKING


@dataclass(frozen=True, slots=True)
class Read:
    """A body that has been read.

    Attributes:
        unknown: Fields of it that nobody knows.
        shape: How the answer is written, once the request has its name.
        grammar_param: The field that errors of the grammar name.
    """

    prepared: Prepared
    unknown: int
    shape: Callable[[GenerateRequest], Shape]
    grammar_param: str = "response_format"


class ConversationEndpoint(GenerationEndpoint):
    """Messages in, a message out; a protocol says how they are read and how it is written."""

    @abstractmethod
    def read(self, raw: bytes, granting: Granting) -> Read:
        """Check and render. Runs in any thread.

        Args:
            granting: Which effort a conversation that takes less than it asks for is rendered at.

        Raises:
            InvalidRequest, ModelNotFound: As the message says; ``param`` names the field.
        """

    async def ask(self, raw: bytes, caller: Caller) -> Asked:
        """A checked request; see ``GenerationEndpoint``."""
        return await self._ask(raw, caller, lower=False)

    async def ask_less(self, raw: bytes, caller: Caller) -> Asked:
        """The same at its effort floor, which its conversation keeps."""
        return await self._ask(raw, caller, lower=True)

    async def _ask(self, raw: bytes, caller: Caller, *, lower: bool) -> Asked:
        parts = self.parts
        granting = Granting(parts.grants, caller.key_name, lower)
        read = await off_the_loop(parts, len(raw), lambda: self.read(raw, granting))
        if read.unknown:
            parts.metrics.unknown_fields.inc(read.unknown)
        options = read.prepared.options
        chat, images = await show_images(read.prepared.chat, parts)
        await check_grammar(read.prepared.grammar, parts, param=read.grammar_param)
        told = read.prepared.thinking
        thinking = Thinking(chat.effort, told.asked, told.floor, bool(chat.schemas), told.turn, told.name)
        if lower and thinking.effort is not None and thinking.effort != thinking.asked:
            parts.grants.grant(thinking.name, thinking.effort)
        request = generation(
            chat.tokens,
            options,
            parts,
            caller,
            thinking=thinking,
            grammar=read.prepared.grammar,
            turns=True,
            # Reasoning is rendered again only where tools are declared
            keep_tail=chat.effort is None or bool(chat.schemas),
            images=images,
        )
        parsing = parser_options(options, parts)
        parsers = [OutputParser(chat, parts.tokenizer, parsing) for _ in range(options.n)]
        return Asked(options, [request], parsers, read.shape(request))


async def show_images(chat: RenderedChat, parts: RouterParts) -> tuple[RenderedChat, tuple[PromptImage, ...]]:
    """A rendered conversation with the spans of its images in their places.

    Raises:
        InvalidRequest: An image cannot be had or is none, or no worker takes images now.
        PayloadTooLarge: One exceeds a limit.
    """
    if not chat.image_sources or parts.pictures is None:
        return chat, ()
    if not parts.pipeline.takes_images():
        raise InvalidRequest("no worker here takes images: image parts are refused", param="messages")
    pictures = await parts.pictures.gather(chat.image_sources)
    tokens, images = parts.pictures.place(chat.tokens, pictures)
    return replace(chat, tokens=tokens), images


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
    if answer_format.free and (plan.calling is Calling.FREE or not chat.schemas):
        return None
    if answer_format.schema is not None:
        check_schema(answer_format.schema, param="response_format")
    stage = chat.parsing.thinking_initial_stage
    reasoning = stage is not None and stage.starts_in_reasoning()
    markers = Markers(tokenizer.dsml_id, tokenizer.eos_id, tokenizer.think_end_id if reasoning else None)
    tools = [
        Tool(name, plan.schemas.get(name, schema) or None, name in plan.strict)
        for name, schema in chat.schemas.items()
    ]
    if plan.calling is Calling.STRICT:
        # Beside strict functions, one that is not strict takes anything
        tools = [tool if tool.strict else Tool(tool.name, None) for tool in tools]
    expected = Expected(answer_format, plan.calling, tools, plan.several, chat.in_calls)
    return grammar_for(expected, markers, read_tokens=chat.prefix_tokens)


async def check_grammar(grammar: Grammar | None, parts: RouterParts, *, param: str) -> None:
    """Let a grammar pass before anything is spent on its request.

    Raises:
        InvalidRequest: It cannot be enforced; ``param`` names the field that asked for it.
    """
    if grammar is None:
        return
    try:
        await parts.grammars.check(grammar)
    except InvalidRequest as error:
        error.param = param
        raise
