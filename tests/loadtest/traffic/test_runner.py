"""Sessions over real HTTP, against a server that is not ours."""

from epdserve.loadtest.results.record import Ending, Record
from epdserve.loadtest.traffic.lexicon import Lexicon
from epdserve.loadtest.traffic.recipes import Kitchen, Sizes, build
from epdserve.loadtest.traffic.runner import Runner, Tally
from epdserve.loadtest.traffic.sessions import Session, Turn
from support.toy_openai import TEMPLATE, toy_server

LEXICON = Lexicon(("a", "of", "to", "the"), overhead=TEMPLATE + 1)


def said(text: str, **fields: object) -> Turn:
    return Turn([{"role": "user", "content": text}], 3, **fields)  # type: ignore[arg-type]


async def test_a_turn_carries_all_that_came_before_it() -> None:
    with toy_server() as server:
        session = Session(0.0, "chat", [said("one"), said("two"), said("three")])
        records = await Runner(server.url, "toy").run([session])
        assert [record.turn for record in records] == [0, 1, 2]
        assert [len(body["messages"]) for body in server.bodies] == [1, 3, 5]
        assert server.bodies[2]["messages"][1] == {"role": "assistant", "content": "yes yes yes "}


async def test_lengths_that_came_are_compared_with_those_asked_for() -> None:
    with toy_server() as server:
        sessions = build("chat", Kitchen(LEXICON, Sizes(prompt=40, answer=8), 1), [0.0] * 3)
        records = await Runner(server.url, "toy").run(sessions)
        assert [(r.prompt_tokens, r.completion_tokens, r.wrong_length) for r in records] == [
            (40, 8, False)
        ] * 3
        off = await Runner(server.url, "toy").run([Session(0.0, "x", [said("one", prompt_tokens=99)])])
        assert off[0].wrong_length


async def test_a_client_that_leaves_and_nonsense_that_is_refused_are_expected() -> None:
    with toy_server(gap_s=0.05) as server:
        leaving = Session(0.0, "x", [said("one", leave_after_s=0.02), said("never sent")])
        nonsense = Session(0.0, "x", [said("one", fields={"model": "none"}, refusal_expected=True)])
        failing = Session(0.0, "x", [said("one", fields={"max_tokens": -1})])
        records = await Runner(server.url, "toy").run([leaving, nonsense, failing])
    endings = {(record.ending, record.expected) for record in records}
    assert endings == {(Ending.LEFT, True), (Ending.REJECTED, True), (Ending.REJECTED, False)}


async def test_a_strict_server_takes_what_is_plain() -> None:
    with toy_server(strict=True) as server:
        session = Session(0.0, "chat", [said("one")])
        assert (await Runner(server.url, "toy").run([session]))[0].ending is Ending.REJECTED
        assert (await Runner(server.url, "toy", plain=True).run([session]))[0].ok


async def test_each_tenant_has_its_key_and_somebody_may_watch() -> None:
    seen: list[tuple[int, int]] = []

    def watch(tally: Tally, record: Record | None) -> None:
        seen.append((tally.ended, tally.in_flight))

    with toy_server() as server:
        sessions = [Session(0.0, "x", [said("one")], tenant) for tenant in (0, 1, 3)]
        records = await Runner(server.url, "toy", keys=["a", "b"], watch=watch).run(sessions)
        assert sorted(server.keys) == ["Bearer a", "Bearer b", "Bearer b"]
    assert [record.tenant for record in records] == [0, 1, 1]
    assert seen[-1] == (3, 0)


async def test_sessions_begin_at_their_times_however_slow_the_server_is() -> None:
    with toy_server(gap_s=0.05) as server:
        sessions = [Session(0.03 * number, "x", [said("one")]) for number in range(4)]
        records = await Runner(server.url, "toy").run(sessions)
    assert all(record.late_s < 0.05 for record in records)
    assert records[3].at_s < records[0].e2e_s  # sent before the first had its answer
