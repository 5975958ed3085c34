#!/usr/bin/env bash
# Makes the environment if there is none and runs every check:  bash deploy/test.sh [--all] [pytest arguments]
# Tests that need a program this machine lacks are named as not run; --all makes that a failure.
# Tests run in one random order, the same for everybody: --randomly-seed=N is another one.
# Safe beside a running `up`: ports, Ray, registry and folders are the tests' own.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source deploy/environment.sh
make_environment dev

export PYTHONSAFEPATH=1 # our kernels/ folder would shadow a library of that name
export OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 # several processes on few cores: spinning costs 3-6x
mkdir -p .typecheck .run
ln -sfn .. .typecheck/epdserve # mypy does not follow setuptools' editable finder

failed=() chaos=""
trap 'kill $(jobs -p) 2>/dev/null' EXIT
step() { # step NAME COMMAND...
  say "$1"
  "${@:2}" || failed+=("$1")
}

.venv/bin/mypy >.run/mypy.log 2>&1 & # the slowest check, on the second core
mypy=$!
bash deploy/tools.sh >.run/tools.log 2>&1 & # once; without them the chart's tests are named as not run
tools=$!
step "ruff check" .venv/bin/ruff check --quiet .
step "ruff format" .venv/bin/ruff format --check --quiet .
step "lint-imports" .venv/bin/lint-imports --no-logo
wait "$tools" || say "helm could not be fetched, see .run/tools.log"
if (($# == 0)) || [[ $* == --all ]]; then # everything: three minutes of misfortune beside the tests
  .venv/bin/python -m epdserve.loadtest.chaos loadtest/chaos/plans/tests.toml >.run/chaos.log 2>&1 &
  chaos=$!
fi
step "pytest" .venv/bin/python -m pytest -n 2 --no-loadscope-reorder --randomly-seed=1800472978 "$@"
say "mypy --strict"
wait "$mypy" || failed+=("mypy")
tail -n 40 .run/mypy.log
if [[ -n $chaos ]]; then
  say "chaos"
  wait "$chaos" || failed+=("chaos")
  tail -n 40 .run/chaos.log
fi

if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
say "all checks passed"
