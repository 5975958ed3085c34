"""Which effort a conversation was granted: its later turns keep it, or each would lose the cached prompt.

A conversation is known by its tenant and by its messages up to the first of the user. Forgotten ones may ask again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import orjson
from epdserve.services.types import Effort

_LIMIT: Final = 65_536


class Grants:
    """Owned by the event loop, read from any thread; bounded."""

    def __init__(self, *, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._efforts: OrderedDict[bytes, Effort] = OrderedDict()
        self.lowered = 0

    def __len__(self) -> int:
        return len(self._efforts)

    def granted(self, conversation: bytes) -> Effort | None:
        """What an earlier turn was granted instead of what it had asked for."""
        return self._efforts.get(conversation)

    def grant(self, conversation: bytes, effort: Effort) -> None:
        """Note that a conversation runs with a lower effort from now on."""
        self._efforts[conversation] = effort
        self._efforts.move_to_end(conversation)
        self.lowered += 1
        while len(self._efforts) > self._limit:
            self._efforts.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Granting:
    """What is known of efforts when a conversation is rendered.

    Attributes:
        lower: Render it at its floor: that is what the gate offered.
    """

    grants: Grants
    tenant: str
    lower: bool = False

    def effort(
        self, messages: Sequence[Mapping[str, Any]], asked: Effort | None, floor: int | None
    ) -> tuple[Effort | None, bytes, int]:
        """The effort to render, the conversation's name if it may be lowered, and its turn.

        Args:
            floor: The lowest effort that the client takes, None if it takes no other.
        """
        turn = 1 + sum(message.get("role") == "assistant" for message in messages)
        if asked is None or floor is None or floor >= asked.level:
            return asked, b"", turn
        name = self._name(messages)
        known = self.grants.granted(name)
        if turn > 1 and known is not None and floor <= known.level < asked.level:
            return known, name, turn
        return (Effort(floor) if self.lower and turn == 1 else asked), name, turn

    def _name(self, messages: Sequence[Mapping[str, Any]]) -> bytes:
        head: list[Any] = [self.tenant]
        for message in messages:
            head.append(message)
            if message.get("role") == "user":
                break
        digest = blake2b(digest_size=16)
        digest.update(orjson.dumps(head, option=orjson.OPT_SORT_KEYS))
        return digest.digest()
