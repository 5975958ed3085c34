"""How one step's token budget is shared among the prompts being prefilled. Pure arithmetic.

Max-min fair: every prompt gets an equal share and leaves what it does not need to the others. A short prompt that
arrives behind a long one therefore ends within a step or two, and the long one still uses the whole budget when alone.
"""

from collections.abc import Sequence


def share_budget(remaining_rows: Sequence[int], *, budget: int) -> list[int]:
    """Rows of the next step for each prompt, in the given order.

    The sum is ``min(budget, sum(remaining_rows))``. While the budget lasts, a prompt with fewer remaining rows never
    gets less than its equal share; what cannot be divided evenly goes to the prompts that stand first.

    Raises:
        ValueError: The budget is not positive, or a prompt has no row left.
    """
    if budget <= 0:
        raise ValueError(f"step budget of {budget} tokens")
    if min(remaining_rows, default=1) <= 0:
        raise ValueError(f"a prompt without rows to run: {list(remaining_rows)}")
    shares = [0] * len(remaining_rows)
    smallest_first = sorted(range(len(remaining_rows)), key=lambda i: (remaining_rows[i], -i))
    for served, i in enumerate(smallest_first):
        shares[i] = min(remaining_rows[i], budget // (len(smallest_first) - served))
        budget -= shares[i]
    for i, left in enumerate(remaining_rows):
        extra = min(budget, left - shares[i])
        shares[i] += extra
        budget -= extra
    return shares


def first_come(remaining_rows: Sequence[int], *, budget: int) -> list[int]:
    """Rows of the next step where prompts stand in order of urgency: each takes all it can before the next one.

    Raises:
        ValueError: The budget is not positive.
    """
    if budget <= 0:
        raise ValueError(f"step budget of {budget} tokens")
    shares = []
    for left in remaining_rows:
        shares.append(min(left, budget))
        budget -= shares[-1]
    return shares
