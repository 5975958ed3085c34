#!/usr/bin/env bash
# Installs clients whose packages do not go with ours into .venv-clients and runs their tests:  bash deploy/clients.sh
# Needs deploy/test.sh to have made .venv, and npm for the client of that registry (named as not run without it).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wanted=$(sha256sum deploy/requirements-clients.txt | cut -d' ' -f1)
if [[ "$(cat .venv-clients/stamp 2>/dev/null)" != "$wanted" ]]; then
  python3 -m venv .venv-clients
  .venv-clients/bin/python -m pip install --disable-pip-version-check -q -r deploy/requirements-clients.txt
  if command -v npm >/dev/null; then
    npm install --prefix .venv-clients --no-audit --no-fund --silent openai@6.49.0
    # What tests look for: node where that package is to be found
    printf '#!/bin/sh\nexec node "$@"\n' >.venv-clients/bin/node-openai
    chmod +x .venv-clients/bin/node-openai
  fi
  printf '%s' "$wanted" >.venv-clients/stamp
fi
export PYTHONSAFEPATH=1 OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest tests/integration/stack/test_other_clients.py -m slow "$@"
