"""``/v1/responses``, without state: what a client wants remembered it sends again."""
