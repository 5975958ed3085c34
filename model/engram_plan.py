"""Hash constants of the Engram tables, derived from the config alone (modules 1.3, 1.4).

A table row is chosen by hashing the compressed ids of the last 2, 3 and 4 tokens. Every (n-gram size, head)
has a prime of its own as modulus; the columns of one layer lie one after another in its table, so the primes
of a layer add up to its number of rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import Final

import numpy as np
from epdserve.model.config import ModelConfig
from epdserve.model.errors import ConfigError

_SEED_PER_LAYER: Final = 10007
_INT64_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class EngramTable:
    """Hash constants of one layer. Columns run over n-gram sizes 2, 3, 4 (outer) and heads (inner)."""

    layer: int
    multipliers: tuple[int, ...]  # one per look-back: own token first
    primes: tuple[tuple[int, ...], ...]  # [n-gram size - 2][head]
    offsets: tuple[int, ...]  # first row of each column
    rows: int

    @property
    def columns(self) -> int:
        """Rows looked up per token."""
        return len(self.offsets)


@dataclass(frozen=True, slots=True)
class EngramPlan:
    """All Engram tables, by ascending layer."""

    tables: tuple[EngramTable, ...]

    @classmethod
    def of(cls, config: ModelConfig) -> "EngramPlan":
        """Derive the constants.

        Raises:
            ConfigError: If a table height differs from ``engram_num_embeddings``: hashes would then point at
                wrong rows without any other sign.
        """
        text = config.text
        used: set[int] = set()
        tables = tuple(_table(config, layer, used) for layer in text.engram_layer_ids)
        problems = [
            f"engram_num_embeddings of layer {table.layer} is {stated}, its primes add up to {table.rows}"
            for table, stated in zip(tables, text.engram_num_embeddings, strict=True)
            if table.rows != stated
        ]
        if problems:
            raise ConfigError("Engram tables", problems)
        return cls(tables)

    def table_of(self, layer: int) -> EngramTable:
        """The table before ``layer``.

        Raises:
            KeyError: If the layer has none.
        """
        for table in self.tables:
            if table.layer == layer:
                return table
        raise KeyError(f"layer {layer} has no Engram table")


def _table(config: ModelConfig, layer: int, used: set[int]) -> EngramTable:
    text = config.text
    primes = tuple(
        tuple(islice(_fresh_primes(text.engram_vocab_size, used), text.engram_n_heads))
        for _ in range(2, text.engram_max_ngram_size + 1)
    )
    starts = list(accumulate((prime for order in primes for prime in order), initial=0))
    multipliers = _multipliers(layer, text.engram_max_ngram_size, text.engram_compressed_vocab_size)
    return EngramTable(layer, multipliers, primes, tuple(starts[:-1]), starts[-1])


def _multipliers(layer: int, number: int, compressed_vocab_size: int) -> tuple[int, ...]:
    # The bound keeps id * multiplier below 2^63, so hashes never turn negative.
    bound = max(1, _INT64_MAX // compressed_vocab_size // 2)
    draws = np.random.default_rng(_SEED_PER_LAYER * layer).integers(0, bound, number, dtype=np.int64)
    return tuple(2 * int(draw) + 1 for draw in draws)


def _fresh_primes(at_least: int, used: set[int]) -> Iterator[int]:
    """Primes from ``at_least`` upwards that no column of any layer has taken; taking one marks it."""
    for candidate in count(at_least):
        if candidate not in used and _is_prime(candidate):
            used.add(candidate)
            yield candidate


def _is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % divisor for divisor in range(3, int(number**0.5) + 2, 2))
