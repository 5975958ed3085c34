"""``epdserve generate``: prefill and decode in this process, no server; what the pools are compared with.

Requests are chat bodies of the HTTP API, rendered and parsed by the router's own code, so that a text here and one from
a server can be compared letter by letter.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epdserve.model.errors import ModelError
from epdserve.services.cli.errors import CommandError
from epdserve.services.engine.config import EngineSettings
from epdserve.services.errors import InvalidRequest, ServiceError
from epdserve.services.local.config import LocalSettings
from epdserve.services.local.engine import Generation, LocalEngine
from epdserve.services.router.effort import resolve_effort
from epdserve.services.router.events import Delta, Kind
from epdserve.services.router.fields import parse_body
from epdserve.services.router.images.config import ImageSettings
from epdserve.services.router.images.opening import open_pictures
from epdserve.services.router.images.pictures import PromptImage
from epdserve.services.router.openai_chat.body import ChatBody
from epdserve.services.router.options import sampling_of
from epdserve.services.router.parsing import OutputParser, ParserOptions
from epdserve.services.router.rendering import ChatPrompt, ChatRenderer, RenderedChat
from epdserve.services.router.tokenizer import RouterTokenizer
from epdserve.services.types import SamplingParams

MAX_TOKENS = 256  # of a request that names no limit


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's outcome. Times are seconds since its round began."""

    reasoning: str
    content: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    token_at_s: list[float]


@dataclass(frozen=True, slots=True)
class _Asked:
    chat: RenderedChat
    sampling: SamplingParams
    parsing: ParserOptions
    exact: bool
    deterministic: bool
    images: tuple[PromptImage, ...]


class Generator:
    """A model with its chat format, in this process. Close it.

    Raises:
        CommandError: The model cannot be used.
    """

    def __init__(self, model_dir: Path, *, threads: int) -> None:
        try:
            self._tokenizer = RouterTokenizer.from_directory(model_dir)
            # Nothing is fetched here: images come as data URLs
            self._pictures = open_pictures(model_dir, ImageSettings(), self._tokenizer)
            self._renderer = ChatRenderer(self._tokenizer, takes_images=self._pictures is not None)
            settings = LocalSettings(engine=EngineSettings(model_dir=model_dir, threads=threads))
            self._engine = LocalEngine(model_dir, settings)
        except (ModelError, ServiceError, OSError, ValueError) as error:
            raise CommandError(f"cannot use the model in {model_dir}: {error}") from error

    def close(self) -> None:
        """End the engine's threads."""
        self._engine.close()

    def answer(self, bodies: Sequence[Mapping[str, Any]], *, stream: bool = False) -> list[Answer]:
        """Answer all requests, batched together.

        Args:
            bodies: As of ``POST /v1/chat/completions``; ``model`` may be missing.
            stream: Write the first answer's text to standard output as it comes.

        Raises:
            CommandError: One of them cannot be answered.
        """
        times: list[list[float]] = [[] for _ in bodies]
        try:
            asked = [self._render(body) for body in bodies]
            parsers = [OutputParser(each.chat, self._tokenizer, each.parsing) for each in asked]
            pieces: list[list[Delta]] = [[] for _ in bodies]
            began = time.monotonic()

            def take(index: int, tokens: tuple[int, ...]) -> None:
                times[index] += [time.monotonic() - began] * len(tokens)
                deltas = parsers[index].push(tokens)
                pieces[index] += deltas
                if stream and index == 0:
                    _show(deltas)

            done = self._generate(asked, take)
        except ServiceError as error:
            raise CommandError(str(error)) from error
        for index, (parser, generation) in enumerate(zip(parsers, done, strict=True)):
            last = parser.finish(generation.finish_reason)
            pieces[index] += last
            if stream and index == 0:
                _show(last)
        return [_answer(*each) for each in zip(asked, parsers, pieces, done, times, strict=True)]

    def _generate(self, asked: Sequence[_Asked], take: Any) -> list[Generation]:
        modes = {(each.exact, each.deterministic) for each in asked}
        if len(modes) != 1:
            raise CommandError("requests of one file are all exact or none is, and deterministic likewise")
        ((exact, deterministic),) = modes
        prompts = [each.chat.tokens for each in asked]
        return self._engine.generate(
            prompts,
            [each.sampling for each in asked],
            exact=exact,
            deterministic=deterministic,
            images=[each.images for each in asked],
            on_tokens=take,
        )

    def _render(self, raw: Mapping[str, Any]) -> _Asked:
        body = parse_body(ChatBody, {"model": "local", **raw})
        options, answer_format = body.options(), body.answer_format()
        if options.n != 1 or options.logprobs is not None or not answer_format.free:
            raise InvalidRequest("n, logprobs and formats of the answer need a server")
        effort = resolve_effort(
            thinking=body.thinking_switch, effort=body.asked_effort, default_thinking=True
        )
        chat = self._renderer.render(
            ChatPrompt(body.conversation(), effort, body.tools or (), body.tool_choice),
            max_tokens=self._engine.max_context_tokens,
        )
        sampling = sampling_of(options, max_tokens=options.max_tokens or MAX_TOKENS)
        parsing = ParserOptions(stops=options.stops, stop_token_ids=options.stop_token_ids)
        chat, images = self._show(chat)
        if options.exact and options.deterministic:
            raise InvalidRequest("deterministic does not go together with exact", param="deterministic")
        return _Asked(chat, sampling, parsing, options.exact, options.deterministic, images)

    def _show(self, chat: RenderedChat) -> tuple[RenderedChat, tuple[PromptImage, ...]]:
        """The prompt with the spans of its images in their places."""
        if not chat.image_sources or self._pictures is None:
            return chat, ()
        pictures = asyncio.run(self._pictures.gather(chat.image_sources))
        tokens, images = self._pictures.place(chat.tokens, pictures)
        return replace(chat, tokens=tokens), images


def run(
    model_dir: Path, bodies: Sequence[Mapping[str, Any]], *, threads: int, rounds: int, as_json: bool
) -> None:
    """Answer, and print: the texts as they are, or one JSON object with times.

    Args:
        rounds: How often everything is asked; later rounds find the prefix cache filled.

    Raises:
        CommandError: The model or a request cannot be used.
    """
    generator = Generator(model_dir, threads=threads)
    try:
        told = [generator.answer(bodies, stream=not as_json and len(bodies) == 1) for _ in range(rounds)]
    finally:
        generator.close()
    if as_json:
        print(json.dumps({"rounds": [[_fields(answer) for answer in answers] for answers in told]}))
        return
    for answer in told[-1]:
        if len(bodies) > 1:
            print(answer.reasoning + answer.content)
        print(_receipt(answer), file=sys.stderr)


def read_bodies(path: Path) -> list[dict[str, Any]]:
    """Chat bodies of a JSON file that holds a list of them.

    Raises:
        CommandError: The file cannot be read or holds something else.
    """
    try:
        bodies = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read requests from {path}: {error}") from error
    if not isinstance(bodies, list) or not bodies or not all(isinstance(body, dict) for body in bodies):
        raise CommandError(f"{path} must hold a non-empty JSON list of chat requests")
    return bodies


def _answer(
    asked: _Asked, parser: OutputParser, pieces: Sequence[Delta], done: Generation, times: list[float]
) -> Answer:
    return Answer(
        reasoning="".join(piece.text for piece in pieces if piece.kind is Kind.REASONING),
        content="".join(piece.text for piece in pieces if piece.kind is Kind.CONTENT),
        finish_reason=done.finish_reason.value if parser.ending is None else parser.ending.reason,
        prompt_tokens=len(asked.chat.tokens),
        cached_tokens=done.prefill.cached_tokens,
        token_at_s=times,
    )


def _show(deltas: Sequence[Delta]) -> None:
    for delta in deltas:
        if delta.kind in (Kind.REASONING, Kind.CONTENT):
            print(delta.text, end="", flush=True)


def _fields(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.reasoning + answer.content,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "token_at_s": answer.token_at_s,
    }


def _receipt(answer: Answer) -> str:
    tokens = len(answer.token_at_s)
    parts = [
        f"\nprompt {answer.prompt_tokens} tokens ({answer.cached_tokens} cached)",
        f"answer {tokens} tokens",
    ]
    if tokens > 1 and answer.token_at_s[-1] > answer.token_at_s[0]:
        rate = (tokens - 1) / (answer.token_at_s[-1] - answer.token_at_s[0])
        parts += [f"first after {answer.token_at_s[0] * 1e3:.0f} ms", f"{rate:.1f} tokens/s"]
    return " | ".join([*parts, f"ended by {answer.finish_reason}"])
