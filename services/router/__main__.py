"""``python -m epdserve.services.router --config FILE``: one router process."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from epdserve.services.config import ConfigError, config_text, load_config
from epdserve.services.errors import ServiceError
from epdserve.services.observability.logs import setup_logging
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.listening import inherited
from epdserve.services.router.server import run


def main(argv: list[str] | None = None) -> int:
    """Serve until told to end; 0 after a clean end, 2 if the settings will not do, 1 if it cannot run."""
    parser = argparse.ArgumentParser(prog="epdserve-router", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML file with the router's settings")
    parser.add_argument("--section", help="table of the file that holds them")
    parser.add_argument("--check", action="store_true", help="print the settings and end")
    parser.add_argument("--log-level", default="INFO")
    parser.add_argument("--listen-fd", type=int, help="descriptor of a listening socket to serve on")
    given = parser.parse_args(argv)
    try:
        config = load_config(given.config, RouterConfig, section=given.section)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if given.check:
        print(config_text(config))
        return 0
    setup_logging(level=given.log_level, fields={"role": "router", "router": config.router_id})
    try:
        run(config, None if given.listen_fd is None else inherited(given.listen_fd))
    except (ServiceError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
