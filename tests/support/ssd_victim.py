"""A process that stores blocks as fast as it can until it is killed. Prints what it knows to be durable.

Arguments: folder, seed. Each line is a block's number, written after ``put_batch`` returned.
"""

import sys
from pathlib import Path

from epdserve.kvstore.ssd.retention import Mode, RetentionPolicy
from support.ssd import make_tier, name, put_of

SLOTS = 64
POLICY = RetentionPolicy(
    floor_s=0, mode=Mode.BEST_EFFORT, reserve_ratio=0.0, low_free_ratio=0.2, high_free_ratio=0.3
)


def main() -> None:
    folder, first = Path(sys.argv[1]), int(sys.argv[2])
    tier = make_tier([folder], slots=SLOTS, threads=2, policy=POLICY, settings={"slots_per_file": 40})
    tier.open()
    print("ready", flush=True)
    for number in range(first, first + 100_000, 4):
        tier.put_batch([put_of(name(number + k)) for k in range(4)])
        print(number + 3, flush=True)
        if number % 64 == 0:
            tier.delete_root(b"no such root....")
            tier.sweep()


if __name__ == "__main__":
    main()
