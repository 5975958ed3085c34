"""Load tests: a customer that knows HTTP and nothing else of this project."""
