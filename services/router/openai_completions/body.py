"""The body of a raw completion."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from epdserve.services.errors import InvalidRequest
from epdserve.services.router.answer_format import OLD_NAMES, AnswerFormat, of_fields
from epdserve.services.router.fields import SamplingBody, TokenId, Top, unless
from epdserve.services.router.options import MAX_COMPLETION_TOKENS, Options
from pydantic import Field, StrictBool, StrictInt, StrictStr

# As OpenAI documents it
_DEFAULT_MAX_TOKENS: Final = 16
_MOST_CHOICES: Final = 128

Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionBody(SamplingBody):
    """``POST /v1/completions``."""

    unserved: ClassVar = {
        "bad_words": unless([]),
        "return_token_ids": unless(False),
        "truncate_prompt_tokens": unless(),
    }
    words: ClassVar = {
        **SamplingBody.words,
        "prompt": "a string, a list of strings, a list of token ids or a list of such lists, none of them empty",
    }

    prompt: (
        StrictStr
        | Ids
        | Annotated[list[StrictStr], Field(min_length=1)]
        | Annotated[list[Ids], Field(min_length=1)]
    )
    suffix: StrictStr | None = None
    echo: StrictBool | None = None
    best_of: Annotated[StrictInt, Field(ge=1)] | None = None
    # 0 asks for the prompt's echo alone
    max_tokens: Annotated[StrictInt, Field(ge=0, le=MAX_COMPLETION_TOKENS)] | None = None
    logprobs: Top | StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def unknown(self) -> int:
        """How many fields of the body nobody knows."""
        return sum(name not in self.unserved and name not in OLD_NAMES for name in self.model_extra or ())

    @property
    def told(self) -> int | None:
        """Alternatives told with each token; None = nothing is told."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return 1 if self.logprobs is True else self.logprobs

    def options(self) -> Options:
        """What is asked for besides the prompts.

        Raises:
            InvalidRequest: Fields that do not go together.
        """
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise InvalidRequest("best_of is served only if it equals n", param="best_of")
        if n * len(self.prompts) > _MOST_CHOICES:
            raise InvalidRequest(f"n times the prompts may be {_MOST_CHOICES} at most", param="n")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens = 0 needs echo", param="max_tokens")
        if self.suffix is not None and (self.echo or not all(isinstance(p, str) for p in self.prompts)):
            raise InvalidRequest("suffix needs prompts that are strings, and no echo", param="suffix")
        common = self.common()
        common["max_tokens"] = _DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)
        if self.echo and self.told is not None and self.prompt_logprobs is None:
            common["prompt_logprobs"] = self.told
        return Options(**common, logprobs=self.told)

    def answer_format(self) -> AnswerFormat:
        """What the text has to look like. Raises as ``of_fields``."""
        return of_fields(self.response_format, self.structured_outputs, self.model_extra or {})
