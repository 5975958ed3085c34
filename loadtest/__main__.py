"""``python -m epdserve.loadtest``: open-loop load on a running server, by HTTP alone, and what came of it.

python -m epdserve.loadtest --url URL [--workload NAME] [--rate N] [--requests N] [--json FILE] [--html FILE]
python -m epdserve.loadtest --trace FILE [--speed 10] [--scale 0.05]
python -m epdserve.loadtest compare FILE FILE
"""

from epdserve.loadtest.command import app

if __name__ == "__main__":
    app()
