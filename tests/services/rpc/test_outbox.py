from __future__ import annotations

from epdserve.services.rpc.outbox import Outbox
from epdserve.services.sampling import TokenLogprob
from epdserve.services.types import FinishReason, TokenChunk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

NAMES = ["a", "b"]
WITH_LOGPROBS = "b"


def _logprobs(name: str, tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    """What the engine tells about tokens: one value each that names the token."""
    return tuple(TokenLogprob(-float(token)) for token in tokens) if name == WITH_LOGPROBS else ()


class OutboxMachine(RuleBasedStateMachine):
    """An outbox, an engine that produces, and a router behind a link that loses what is on its way."""

    @initialize(bases=st.tuples(st.integers(0, 3), st.integers(0, 3)))
    def begin(self, bases: tuple[int, int]) -> None:
        self.outbox = Outbox()
        self.base = dict(zip(NAMES, bases, strict=True))
        self.produced = dict(self.base)
        self.ended: set[str] = set()
        self.received: dict[str, list[int]] = {name: [] for name in NAMES}
        self.got_end: set[str] = set()
        for name in NAMES:
            self.outbox.open(name, offset=self.base[name])

    @rule(name=st.sampled_from(NAMES), count=st.integers(0, 4), last=st.booleans())
    def produce(self, name: str, count: int, last: bool) -> None:
        start = self.produced[name]
        tokens = tuple(range(start, start + count))
        reason = FinishReason.STOP if last else None
        chunk = TokenChunk(name, start, tokens, reason, logprobs=_logprobs(name, tokens))
        kept = self.outbox.append(chunk, now=0.0)
        assert kept == (name not in self.ended)
        if kept:
            self.produced[name] += count
            if last:
                self.ended.add(name)

    @rule(name=st.sampled_from(NAMES))
    def produce_at_the_wrong_offset(self, name: str) -> None:
        assert not self.outbox.append(TokenChunk(name, self.produced[name] + 1, (0,)), now=0.0)

    def _arrive(self, chunk: TokenChunk) -> None:
        have = self.base[chunk.request_id] + len(self.received[chunk.request_id])
        assert chunk.offset <= have, "a gap"
        assert chunk.logprobs == _logprobs(chunk.request_id, chunk.tokens)
        self.received[chunk.request_id].extend(chunk.tokens[have - chunk.offset :])
        if chunk.final:
            self.got_end.add(chunk.request_id)

    @rule()
    def deliver(self) -> None:
        for chunk in self.outbox.take():
            self._arrive(chunk)

    @rule()
    def lose_a_frame_and_resume(self) -> None:
        self.outbox.take()
        for name in NAMES:
            if name in self.outbox:
                assert self.outbox.rewind(name, self._next(name))

    @rule(name=st.sampled_from(NAMES))
    def resume_without_need(self, name: str) -> None:
        if name in self.outbox:
            assert self.outbox.rewind(name, self._next(name))

    @rule(name=st.sampled_from(NAMES), back=st.integers(0, 3))
    def acknowledge(self, name: str, back: int) -> None:
        offset = max(self.base[name], self._next(name) - back)
        final = name in self.got_end and back == 0
        if self.outbox.acknowledge(name, offset, final=final):
            assert final

    @rule(name=st.sampled_from(NAMES))
    def acknowledge_what_never_was(self, name: str) -> None:
        if name not in self.ended:
            have = self._next(name)
            if have == self.produced[name]:
                assert not self.outbox.acknowledge(name, have + 100, final=True)

    @precondition(lambda self: len(self.ended) == len(NAMES))
    @rule()
    def drain(self) -> None:
        for chunk in self.outbox.take():
            self._arrive(chunk)
        for name in NAMES:
            assert self._next(name) == self.produced[name]
            assert name in self.got_end
            self.outbox.acknowledge(name, self._next(name), final=True)
        assert len(self.outbox) == 0
        assert self.outbox.kept_tokens == 0

    def _next(self, name: str) -> int:
        return self.base[name] + len(self.received[name])

    @invariant()
    def what_came_is_what_was_produced(self) -> None:
        for name in NAMES:
            start = self.base[name]
            assert self.received[name] == list(range(start, start + len(self.received[name])))
            assert self._next(name) <= self.produced[name]


TestOutbox = OutboxMachine.TestCase
TestOutbox.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_rewind_before_what_is_kept_is_refused() -> None:
    outbox = Outbox()
    outbox.open("a", offset=0)
    outbox.append(TokenChunk("a", 0, (1, 2, 3)), now=0.0)
    outbox.acknowledge("a", 2, final=False)
    assert outbox.unacknowledged("a") == 1
    assert not outbox.rewind("a", 1)
    assert not outbox.rewind("a", 4)
    assert not outbox.rewind("unknown", 0)
    assert outbox.rewind("a", 2)


def test_ended_requests_are_found_by_age() -> None:
    outbox = Outbox()
    outbox.open("a", offset=0)
    outbox.open("b", offset=0)
    outbox.append(TokenChunk("a", 0, (), FinishReason.STOP), now=10.0)
    assert outbox.live() == ["b"]
    assert outbox.ended_before(10.0) == []
    assert outbox.ended_before(10.1) == ["a"]
