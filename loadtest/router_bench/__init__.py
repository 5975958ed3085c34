"""What the router costs, with workers that cost next to nothing; ``python -m epdserve.loadtest.router_bench``."""
