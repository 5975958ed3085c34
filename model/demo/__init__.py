"""A small model in the published format for trying and testing; see ``preset`` for its shapes."""
