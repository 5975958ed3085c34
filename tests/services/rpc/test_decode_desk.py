from __future__ import annotations

import pytest
from epdserve.services.errors import InvalidRequest, Overloaded
from epdserve.services.rpc.convert import decode_job_to_pb
from epdserve.services.rpc.decode_desk import DecodeDesk, RouterState, SessionLimits
from epdserve.services.rpc.pb import decode_pb2
from epdserve.services.types import DecodeJob, FinishReason, TokenChunk
from support.fake_decode import decode_job

LIMITS = SessionLimits(orphan_grace_s=10, keep_ended_s=30, unacknowledged_tokens=5, requests=3)


class Desk:
    """A desk with an engine that only takes notes and a clock that stands."""

    def __init__(self) -> None:
        self.now = 0.0
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.refuse: Overloaded | None = None
        self.desk = DecodeDesk(
            worker="w",
            submit=self._submit,
            cancel=self.cancelled.append,
            limits=LIMITS,
            clock=lambda: self.now,
        )

    def _submit(self, job: DecodeJob) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.submitted.append(job.request_id)

    def enter(self, name: str = "router", session: str = "1") -> RouterState:
        return self.desk.enter(name, session)

    def submit(self, router: RouterState, request_id: str) -> None:
        job = decode_job_to_pb(decode_job(request_id, max_tokens=100))
        self.desk.handle(router, decode_pb2.RouterFrame(submit=job))

    def resume(self, router: RouterState, request_id: str, offset: int) -> None:
        frame = decode_pb2.Resume(request_id=request_id, offset=offset)
        self.desk.handle(router, decode_pb2.RouterFrame(resume=frame))

    def acknowledge(self, router: RouterState, request_id: str, offset: int, *, final: bool = False) -> None:
        ack = decode_pb2.Ack(request_id=request_id, offset=offset, final=final)
        self.desk.handle(router, decode_pb2.RouterFrame(acks=decode_pb2.Acks(acks=[ack])))


def test_orphans_of_a_dead_router_are_cancelled_after_the_grace() -> None:
    desk = Desk()
    router = desk.enter()
    desk.submit(router, "a")
    desk.desk.leave(router, router.generation)
    desk.now = 9.9
    desk.desk.sweep()
    assert desk.cancelled == []
    desk.now = 10.0
    desk.desk.sweep()
    assert desk.cancelled == ["a"]
    assert desk.desk.routers == {}
    assert desk.desk.counts.orphans_cancelled == 1
    desk.desk.publish([TokenChunk("a", 0, (1,))])
    assert desk.desk.counts.chunks_ignored == 1


def test_router_that_comes_back_in_time_finds_its_output() -> None:
    desk = Desk()
    router = desk.enter()
    desk.submit(router, "a")
    desk.desk.publish([TokenChunk("a", 0, (1, 2))])
    router.outbox.take()
    desk.desk.leave(router, router.generation)
    desk.desk.publish([TokenChunk("a", 2, (3,))])
    desk.now = 9.0
    again = desk.enter()
    assert again is router
    desk.resume(again, "a", 1)
    desk.resume(again, "a", 1)
    assert [(chunk.offset, chunk.tokens) for chunk in router.outbox.take()] == [(1, (2, 3))]
    desk.now = 100.0
    desk.desk.sweep()
    assert desk.cancelled == []


def test_late_end_of_a_replaced_stream_does_not_make_its_router_away() -> None:
    desk = Desk()
    router = desk.enter()
    old = router.generation
    desk.enter()
    desk.desk.leave(router, old)
    assert router.attached


def test_new_life_of_a_router_ends_what_the_former_left() -> None:
    desk = Desk()
    desk.submit(desk.enter(session="1"), "a")
    router = desk.enter(session="2")
    assert desk.cancelled == ["a"]
    desk.resume(router, "a", 0)
    assert list(router.unknown) == ["a"]


def test_request_sent_twice_runs_once_and_is_answered_from_the_start() -> None:
    desk = Desk()
    router = desk.enter()
    desk.submit(router, "a")
    desk.desk.publish([TokenChunk("a", 0, (1, 2))])
    router.outbox.take()
    desk.submit(router, "a")
    assert desk.submitted == ["a"]
    assert [chunk.tokens for chunk in router.outbox.take()] == [(1, 2)]


def test_request_id_of_another_router_is_refused_and_left_alone() -> None:
    desk = Desk()
    first, second = desk.enter("r1"), desk.enter("r2")
    desk.submit(first, "a")
    desk.submit(second, "a")
    (refusal,) = second.outbox.take()
    assert refusal.error is not None
    assert refusal.error.code == "invalid_request"
    desk.acknowledge(second, "a", 0, final=True)
    desk.desk.publish([TokenChunk("a", 0, (1,))])
    assert [chunk.tokens for chunk in first.outbox.take()] == [(1,)]
    assert desk.cancelled == []


def test_refused_job_is_an_error_chunk_that_names_the_worker() -> None:
    desk = Desk()
    desk.refuse = Overloaded("full", retry_after_s=1.0)
    router = desk.enter()
    desk.submit(router, "a")
    (refusal,) = router.outbox.take()
    assert refusal.error is not None
    assert (refusal.error.code, refusal.error.retry_after_s, refusal.error.worker) == ("overloaded", 1.0, "w")


def test_output_nobody_acknowledges_is_bounded() -> None:
    desk = Desk()
    router = desk.enter()
    desk.submit(router, "a")
    desk.desk.publish([TokenChunk("a", 0, (1, 2, 3, 4, 5))])
    assert desk.cancelled == []
    desk.desk.publish([TokenChunk("a", 5, (6,))])
    assert desk.cancelled == ["a"]
    (chunk,) = router.outbox.take()
    assert chunk.tokens == (1, 2, 3, 4, 5, 6)
    assert chunk.error is not None


def test_gap_in_the_output_ends_the_request() -> None:
    desk = Desk()
    router = desk.enter()
    desk.submit(router, "a")
    desk.desk.publish([TokenChunk("a", 3, (1,))])
    (chunk,) = router.outbox.take()
    assert chunk.error is not None
    assert chunk.error.code == "internal"
    assert desk.cancelled == ["a"]


def test_end_nobody_acknowledges_is_forgotten_in_time() -> None:
    desk = Desk()
    router = desk.enter()
    desk.submit(router, "a")
    desk.desk.publish([TokenChunk("a", 0, (1,), FinishReason.STOP)])
    desk.now = 30.1
    desk.desk.sweep()
    assert len(router.outbox) == 0
    assert desk.cancelled == []


def test_acknowledged_end_frees_the_request_id() -> None:
    desk = Desk()
    router = desk.enter()
    desk.submit(router, "a")
    desk.desk.publish([TokenChunk("a", 0, (1,), FinishReason.STOP)])
    desk.acknowledge(router, "a", 1)
    assert "a" in router.outbox
    desk.acknowledge(router, "a", 1, final=True)
    assert "a" not in router.outbox
    other = desk.enter("other")
    desk.submit(other, "a")
    assert desk.submitted == ["a", "a"]


def test_cancel_of_a_foreign_or_unknown_request_does_nothing() -> None:
    desk = Desk()
    first, second = desk.enter("r1"), desk.enter("r2")
    desk.submit(first, "a")
    desk.desk.handle(second, decode_pb2.RouterFrame(cancel=decode_pb2.Cancel(request_id="a")))
    desk.desk.handle(second, decode_pb2.RouterFrame(cancel=decode_pb2.Cancel(request_id="b")))
    assert desk.cancelled == []


def test_one_router_has_a_bounded_number_of_requests() -> None:
    desk = Desk()
    router = desk.enter()
    for name in "abc":
        desk.submit(router, name)
    with pytest.raises(Overloaded):
        desk.submit(router, "d")


def test_hello_in_mid_stream_is_refused() -> None:
    desk = Desk()
    router = desk.enter()
    with pytest.raises(InvalidRequest, match="hello"):
        desk.desk.handle(router, decode_pb2.RouterFrame(hello=decode_pb2.Hello(router_id="x")))


def test_frames_that_came_together_are_heeded_in_order_and_hold_no_others() -> None:
    desk = Desk()
    router = desk.enter()
    submits = [
        decode_pb2.RouterFrame(submit=decode_job_to_pb(decode_job(name, max_tokens=5))) for name in "ab"
    ]
    cancel = decode_pb2.RouterFrame(cancel=decode_pb2.Cancel(request_id="a"))
    many = decode_pb2.RouterFrame(many=decode_pb2.RouterFrames(frames=[*submits, cancel]))
    desk.desk.handle(router, many)
    assert (desk.submitted, desk.cancelled) == (["a", "b"], ["a"])
    with pytest.raises(InvalidRequest, match="hold no others"):
        desk.desk.handle(router, decode_pb2.RouterFrame(many=decode_pb2.RouterFrames(frames=[many])))
