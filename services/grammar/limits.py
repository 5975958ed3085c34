"""How much a grammar may cost. A schema or a regular expression comes from a client: its size means nothing good."""

from __future__ import annotations

from dataclasses import dataclass

import llguidance


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds of one grammar. The library counts its own work ("fuel") and gives up by itself; times are ours.

    Attributes:
        text_bytes: Of a schema or a grammar, UTF-8.
        regex_bytes: Of a regular expression.
        check_s: From asking to the answer of a check, waiting included.
        compile_s: From asking to the compiled grammar, waiting and loading the vocabulary included.
        build_fuel: Work of building the lexer; some 50,000 a millisecond.
        step_fuel: Work of one mask; some 14,000 a millisecond.
        step_items: Parser items of one mask.
        row_items: Parser items of one position.
        lexer_states: States the lexer may take up, 1 to 2 kB each.
        symbols: Symbols in all rules.
    """

    text_bytes: int = 128 * 1024
    regex_bytes: int = 16 * 1024
    check_s: float = 2.0
    compile_s: float = 10.0
    build_fuel: int = 1_000_000
    step_fuel: int = 200_000
    step_items: int = 50_000
    row_items: int = 2_000
    lexer_states: int = 50_000
    symbols: int = 250_000

    def of_parser(self) -> llguidance.LLParserLimits:
        """The library's own limits. Its longer error texts would repeat the grammar."""
        return llguidance.LLParserLimits(
            max_items_in_row=self.row_items,
            initial_lexer_fuel=self.build_fuel,
            step_lexer_fuel=self.step_fuel,
            step_max_items=self.step_items,
            max_lexer_states=self.lexer_states,
            max_grammar_size=self.symbols,
            verbose_errors=False,
        )
