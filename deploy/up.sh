#!/usr/bin/env bash
# Makes the environment if there is none and starts a whole epdserve on this machine:  bash deploy/up.sh [--port N]
# [--model DIR] [--config FILE]. All options are those of `epdserve up`; --help lists them. Ctrl-C stops everything.
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source deploy/environment.sh

# Paths were typed relative to the caller's folder, and this script runs in the repository's.
arguments=()
while (($#)); do
  case "$1" in
    --model | --config)
      (($# > 1)) || die "$1 needs a path after it"
      arguments+=("$1" "$(cd "$caller" && realpath -m -- "$2")")
      shift
      ;;
    --model=* | --config=*) arguments+=("${1%%=*}" "$(cd "$caller" && realpath -m -- "${1#*=}")") ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

make_environment run
export PYTHONSAFEPATH=1 # our kernels/ folder would shadow a library of that name
exec .venv/bin/epdserve up "${arguments[@]}"
