"""No process of a running server can be reached from another machine, unless told otherwise."""

from support.listeners import listening_addresses, off_loopback, subprocess_pids
from support.stack import Stack


def test_every_process_listens_on_loopback_only(stack: Stack) -> None:
    state = stack.state()
    pids = [*state["processes"].values(), *(worker["pid"] for worker in state["workers"])]
    pids += [child for pid in pids for child in subprocess_pids(pid)]
    listening = {pid: listening_addresses(pid) for pid in pids}
    assert all(listening[worker["pid"]] for worker in state["workers"])
    assert {pid: found for pid, addresses in listening.items() if (found := off_loopback(addresses))} == {}
