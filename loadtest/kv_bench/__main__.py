"""``python -m epdserve.loadtest.kv_bench``."""

import typer
from epdserve.loadtest.kv_bench.command import main

if __name__ == "__main__":
    typer.run(main)
