"""The endpoint of raw completions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from epdserve.services.errors import InvalidRequest
from epdserve.services.router.conversation import check_grammar, off_the_loop, parser_options
from epdserve.services.router.fields import parse_body, parse_json
from epdserve.services.router.grammar import Expected, Markers, check_schema, grammar_for
from epdserve.services.router.http_errors import ContextTooLong, unknown_model
from epdserve.services.router.openai_completions.body import CompletionBody
from epdserve.services.router.openai_completions.shape import CompletionHead, CompletionShape
from epdserve.services.router.options import Caller, Options, check_choices, context_tokens, generation
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.prompt_logprobs import PromptTold
from epdserve.services.router.raw_parsing import RawParser
from epdserve.services.router.serve import Asked, GenerationEndpoint
from epdserve.services.sampling import Grammar
from epdserve.services.types import TokenIds, token_ids

_FIM: Final = tuple(f"<\uff5cfim\u2581{part}\uff5c>" for part in ("begin", "hole", "end"))


@dataclass(frozen=True, slots=True)
class _Prepared:
    body: CompletionBody
    options: Options
    prompts: list[TokenIds]
    grammar: Grammar | None


class CompletionsEndpoint(GenerationEndpoint):
    """Raw completions.

    Args:
        usage_last: As ``CompletionHead`` has it.
    """

    def __init__(self, parts: RouterParts, *, usage_last: bool = False) -> None:
        super().__init__(parts)
        self._usage_last = usage_last

    async def ask(self, raw: bytes, caller: Caller) -> Asked:
        """A checked request; see ``GenerationEndpoint``."""
        parts = self.parts
        ready = await off_the_loop(parts, len(raw), lambda: self._prepare(raw))
        body, options = ready.body, ready.options
        await check_grammar(ready.grammar, parts, param="response_format")
        if unknown := body.unknown:
            parts.metrics.unknown_fields.inc(unknown)
        requests = [
            generation(
                tokens, options, parts, caller, grammar=ready.grammar, number=number if number else None
            )
            for number, tokens in enumerate(ready.prompts)
        ]
        parsing = parser_options(options, parts)
        parsers = [
            RawParser(
                parts.tokenizer,
                parsing,
                show_special=body.skip_special_tokens is False,
                discard=body.max_tokens == 0,
            )
            for _ in range(options.n * len(requests))
        ]
        return Asked(options, requests, parsers, self._shape(ready, caller))

    def _shape(self, ready: _Prepared, caller: Caller) -> CompletionShape:
        body, options = ready.body, ready.options
        vocabulary = self.parts.tokenizer.vocabulary
        echoes = [vocabulary.text_of(prompt.tolist()) for prompt in ready.prompts] if body.echo else []
        head = CompletionHead(
            answer_id="cmpl-" + caller.request_id,
            model=body.model,
            created=int(time.time()),
            n=options.n,
            echoes=echoes,
            told=body.told is not None,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            usage_last=self._usage_last,
        )
        if options.prompt_logprobs is None:
            return CompletionShape(head, None, ())
        names = [[vocabulary.name_of(token) for token in prompt.tolist()] for prompt in ready.prompts]
        return CompletionShape(head, PromptTold(ready.prompts, vocabulary), names)

    def _prepare(self, raw: bytes) -> _Prepared:
        """Check and encode. Runs in any thread."""
        parts = self.parts
        body = parse_body(CompletionBody, parse_json(raw, parts.body_limits))
        if body.model not in parts.model_names:
            raise unknown_model(body.model, parts.model_names)
        options = body.options()
        check_choices(options.n, strict=parts.config.strict_official)
        answer_format = body.answer_format()
        if answer_format.schema is not None:
            check_schema(answer_format.schema, param="response_format")
        markers = Markers(parts.tokenizer.dsml_id, parts.tokenizer.eos_id)
        grammar = grammar_for(Expected(answer_format), markers)
        return _Prepared(body, options, [self._encode(prompt, body) for prompt in body.prompts], grammar)

    def _encode(self, prompt: str | list[int], body: CompletionBody) -> TokenIds:
        """Ids of one prompt; in a string, the spelling of a marker is that marker: it is the client's own prompt."""
        parts = self.parts
        tokenizer, room = parts.tokenizer, context_tokens(parts)
        if not isinstance(prompt, str):
            tokenizer.vocabulary.check(prompt, param="prompt")
            return token_ids(prompt)
        size = len(prompt.encode()) + len((body.suffix or "").encode())
        if (least := size // tokenizer.longest_token_bytes) > room:
            raise ContextTooLong(
                f"the context holds {room} tokens: the prompt has at least {least}", param="prompt"
            )
        if body.suffix is None:
            ids = tokenizer.native.encode(prompt)
        else:
            begin, hole, end = (_fim_id(parts, spelling) for spelling in _FIM)
            before, after = tokenizer.plain_ids(prompt), tokenizer.plain_ids(body.suffix)
            ids = [begin, *before, hole, *after, end]
        if not ids:
            raise InvalidRequest("the prompt has no token", param="prompt")
        return token_ids(ids)


def _fim_id(parts: RouterParts, spelling: str) -> int:
    try:
        return parts.tokenizer.marker_id(spelling)
    except ValueError:
        raise InvalidRequest(
            "the tokenizer of this model has no markers for suffix", param="suffix"
        ) from None
