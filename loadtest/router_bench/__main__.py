"""``python -m epdserve.loadtest.router_bench``."""

import typer
from epdserve.loadtest.router_bench.command import main

if __name__ == "__main__":
    typer.run(main)
