"""A conversation becomes token ids: rendering and encoding by the recipe, for every protocol it converts.

Corrections of the recipe (spec 5.3, 6.2), each with a test that names it:
  developer role            the recipe refuses it; rendered as system
  ``reasoning`` in history  the recipe reads ``reasoning_content`` only; either name is taken
  numeric efforts           the recipe refuses them; the number is spliced into the ids of the effort line
  JSON mode without "json"  the recipe refuses it; the conversation gets its format after the check
  forced calls + thinking   the recipe refuses them; rendered as auto, the grammar forces the call after the reasoning

Text of users, tools and schemas never becomes a marker: the recipe encodes it without the added vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import deepseek_recipe as recipe
import numpy as np
import orjson
from epdserve.services.errors import InvalidRequest
from epdserve.services.router.answer_format import AnswerFormat
from epdserve.services.router.http_errors import ContextTooLong
from epdserve.services.router.recipe_refusals import REFUSALS, Items, located
from epdserve.services.router.tokenizer import RouterTokenizer
from epdserve.services.types import Effort, TokenIds, token_ids

# The recipe resolves the prompt layout from a model name of its own; ours has been checked before.
RECIPE_MODEL: Final = "DeepSeek-V4.1-Flash"
EFFORT_NAMES: Final = {50: "low", 75: "high", 100: "max"}
SPLICED_EFFORT: Final = 75
# From here on an array on the way is worth its making
_MANY_IDS: Final = 1024


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt, and what the parser of its answer must know.

    Attributes:
        effort: None if the request does not think.
        conversion: The recipe's request; its chunk generator wants it.
        parsing: How the recipe is to parse the answer.
        schemas: Parameters of each declared function.
        in_calls: The prompt has opened the block of calls.
        prefix_tokens: Ids of an answer that is continued, at the end of the prompt.
        image_sources: Of the conversation, in order; each has one place holder among ``tokens`` still.
    """

    tokens: TokenIds
    effort: Effort | None
    conversion: recipe.ConversationRequest
    parsing: recipe.ParsingOptions
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    in_calls: bool = False
    prefix_tokens: int = 0
    image_sources: tuple[recipe.ImageSource, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The parts of a chat request that shape its prompt or the parsing of its answer.

    Attributes:
        tool_choice: As the recipe takes it in this mode.
    """

    messages: Sequence[dict[str, Any]]
    effort: Effort | None
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: Any = None
    answer_format: AnswerFormat = field(default_factory=AnswerFormat)


class ChatRenderer:
    """Renders conversations for one tokenizer. Thread-safe; encoding releases Python's lock."""

    def __init__(self, tokenizer: RouterTokenizer, *, takes_images: bool = False) -> None:
        """Prepare the encoder.

        Args:
            takes_images: Without it a conversation with images is refused.

        Raises:
            ValueError: The effort line of this tokenizer is not what the splice expects.
        """
        self._tokenizer, self._takes_images = tokenizer, takes_images
        self._encoding = tokenizer.encoding
        self.options = recipe.ConversionOptions()
        self._splice_at, self._spliced_ids = self._find_effort_number()

    def render(self, prompt: ChatPrompt, *, max_tokens: int) -> RenderedChat:
        """Token ids of a chat in OpenAI's words, generation header included. Raises as ``encode``.

        Raises:
            InvalidRequest: The recipe refuses the messages, the tools or what they are combined with.
        """
        return self.encode(self._convert(prompt), prompt.effort, prompt.answer_format, max_tokens=max_tokens)

    def encode(
        self,
        conversion: recipe.ConversationRequest,
        effort: Effort | None,
        answer_format: AnswerFormat = AnswerFormat(),  # noqa: B008 - frozen
        *,
        max_tokens: int,
    ) -> RenderedChat:
        """Token ids of a conversation that the recipe has converted.

        Text that cannot fit ``max_tokens`` however it is cut is refused before it is encoded: encoding takes some 250
        times its bytes in memory.

        Raises:
            ContextTooLong: The prompt has more than ``max_tokens`` tokens for certain.
            InvalidRequest: Images, or unpaired surrogates.
        """
        parsing = conversion.parsing_options
        conversation = _with_format(conversion.conversation, answer_format)
        parsing.parse_json_output = answer_format.any_json
        sources = tuple(source for message in conversation.messages for source in message.image_sources)
        if sources and not self._takes_images:
            raise InvalidRequest(
                "this deployment serves text only: image parts are refused", param="messages"
            )
        text_bytes = len(self._encoding.render_conversation(conversation).prompt.encode())
        if (least := text_bytes // self._tokenizer.longest_token_bytes) > max_tokens:
            raise ContextTooLong(
                f"the context holds {max_tokens} tokens: the messages have at least {least}", param="messages"
            )
        ids = self._encoding.encode(conversation)
        if effort is not None and effort.level not in EFFORT_NAMES:
            start = self._splice_at
            ids[start : start + len(self._spliced_ids)] = self._tokenizer.number_ids(effort.level)
        tools = conversation.tools if parsing.parse_tool_calls else ()
        return RenderedChat(
            _as_tokens(ids),
            effort,
            conversion,
            parsing,
            {tool.name: tool.parameters if isinstance(tool.parameters, dict) else {} for tool in tools},
            parsing.starts_in_tool_calls,
            self._prefix_tokens(conversation, ids),
            sources,
        )

    def _prefix_tokens(self, conversation: recipe.Conversation, ids: list[int]) -> int:
        """Ids after the last marker, if they are an answer that is continued."""
        messages = conversation.messages
        if not messages or not messages[-1].prefix:
            return 0
        markers = self._tokenizer.vocabulary.is_marker
        return next(count for count, token in enumerate(reversed(ids)) if markers(token))

    def _convert(self, prompt: ChatPrompt) -> recipe.ConversationRequest:
        frame: dict[str, Any] = {"model": RECIPE_MODEL, **thinking_fields(prompt.effort)}
        if prompt.effort is not None:
            frame["reasoning_effort"] = rendered_effort(prompt.effort)
        if prompt.tool_choice is not None:
            frame["tool_choice"] = prompt.tool_choice

        def convert(messages: Items, tools: Items) -> recipe.ConversationRequest:
            body = {**frame, "messages": [_corrected(message) for message in messages]}
            if tools:
                body["tools"] = list(tools)
            return recipe.ChatCompletionRequest(orjson.dumps(body)).convert(self.options)

        try:
            return convert(prompt.messages, prompt.tools)
        except REFUSALS as error:
            raise located(error, convert, prompt.messages, prompt.tools) from error

    def _find_effort_number(self) -> tuple[int, list[int]]:
        """Where the number of the effort line stands, and the ids of the number to replace.

        Proven on the three levels that the recipe renders itself, so that a splice is what it would render.
        """
        hello = ({"role": "user", "content": "x"},)
        ids = {
            level: self._encoding.encode(self._convert(ChatPrompt(hello, Effort(level))).conversation)
            for level in EFFORT_NAMES
        }
        numbers = {level: self._tokenizer.number_ids(level) for level in EFFORT_NAMES}
        start = next(i for i, column in enumerate(zip(*ids.values(), strict=False)) if len(set(column)) > 1)
        heads = {tuple(row[:start]) for row in ids.values()}
        tails = {tuple(row[start + len(numbers[level]) :]) for level, row in ids.items()}
        exact = all(row[start : start + len(numbers[level])] == numbers[level] for level, row in ids.items())
        if not exact or len(heads) != 1 or len(tails) != 1:
            raise ValueError("the effort line does not encode its number apart from its neighbours")
        return start, numbers[SPLICED_EFFORT]


def thinking_fields(effort: Effort | None) -> dict[str, Any]:
    """``thinking`` as the recipe takes it."""
    return {"thinking": {"type": "disabled" if effort is None else "enabled"}}


def rendered_effort(effort: Effort) -> str:
    """The name under which the recipe renders an effort, or one whose number is replaced afterwards."""
    return EFFORT_NAMES.get(effort.level, EFFORT_NAMES[SPLICED_EFFORT])


def _as_tokens(ids: list[int]) -> TokenIds:
    """The recipe's ids as an array; numpy alone would hold Python's lock, and every stream, six times as long."""
    made = np.frombuffer(array("i", ids), dtype="<i4") if len(ids) > _MANY_IDS else np.array(ids, dtype="<i4")
    made.flags.writeable = False  # nobody else has it
    return token_ids(made)


def _with_format(conversation: recipe.Conversation, answer_format: AnswerFormat) -> recipe.Conversation:
    if not answer_format.rendered:
        return conversation
    return recipe.Conversation(
        conversation.messages,
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
        response_format="json_object" if answer_format.any_json else "text",
        response_schema=answer_format.schema,
    )


def _corrected(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role == "developer":
        return {**message, "role": "system"}
    if (
        role == "assistant"
        and message.get("reasoning_content") is None
        and message.get("reasoning") is not None
    ):
        return {**message, "reasoning_content": message["reasoning"]}
    return message
