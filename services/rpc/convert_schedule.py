"""Schedules to protobuf and back."""

from __future__ import annotations

from epdserve.services.rpc.convert_sampling import refused
from epdserve.services.rpc.pb import common_pb2
from epdserve.services.schedule import UNHURRIED, Schedule


def schedule_to_pb(schedule: Schedule) -> common_pb2.Schedule | None:
    """A schedule as a message; none for a request that nobody hurries."""
    if schedule == UNHURRIED:
        return None
    return common_pb2.Schedule(
        target_s=schedule.target_s,
        waited_s=schedule.waited_s,
        priority=schedule.priority,
        excess=schedule.excess,
        lengths=schedule.lengths,
    )


def schedule_from_pb(pb: common_pb2.Schedule) -> Schedule:
    """The schedule of a message; an absent one is an empty one.

    Raises:
        InvalidRequest: One that no version of ours writes.
    """
    with refused("schedule"):
        return Schedule(pb.target_s, pb.waited_s, pb.priority, pb.excess, tuple(pb.lengths))
