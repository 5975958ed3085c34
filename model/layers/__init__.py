"""Building blocks of a layer. Plain objects over tensors; they know no request and no page allocation."""
