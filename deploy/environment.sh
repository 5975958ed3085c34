# Sourced by up.sh and test.sh: checks the machine and makes .venv with the pinned packages.
# A finished step leaves a stamp, so a second run costs milliseconds; a lock keeps two scripts from installing at once.
# shellcheck shell=bash

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
die() { printf 'epdserve: %s\n' "$*" >&2; exit 1; }

# The first interpreter that is new enough, or one line that says what to install.
find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    command -v "$candidate" >/dev/null || continue
    "$candidate" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info < (3, 14)))' 2>/dev/null || continue
    "$candidate" -c 'import venv, ensurepip' 2>/dev/null ||
      die "$candidate has no venv module; install it, on Debian: apt-get install python3-venv"
    printf '%s' "$candidate"
    return
  done
  die "no Python 3.11 to 3.13 found; install one, on Debian 12: apt-get install python3 python3-venv"
}

check_machine() {
  [[ "$(uname -s)-$(uname -m)" == Linux-x86_64 ]] ||
    die "needs Linux on x86_64, this is $(uname -s) on $(uname -m)"
  local free_kib
  free_kib=$(df --output=avail -k . | tail -n 1)
  ((free_kib > 6 * 1024 * 1024)) ||
    die "the packages need 6 GiB of disk while they are installed, $PWD has $((free_kib / 1024)) MiB free"
}

# fingerprint FILE...: names what a step depends on; the folder too, since a venv cannot be moved.
fingerprint() { { printf '%s\n' "$PWD" "$("$1" --version 2>&1)"; cat "${@:2}"; } | sha256sum | cut -d' ' -f1; }

# is_current NAME WANTED: true if the step's stamp says it was finished with the same inputs.
is_current() { [[ -x .venv/bin/python && "$(cat ".venv/stamp-$1" 2>/dev/null)" == "$2" ]]; }

# pip_install ARGUMENT...: on a terminal one line that changes while pip works; the end of its log if it fails.
pip_install() {
  local log=.run/pip.log pip
  .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$@" >"$log" 2>&1 &
  pip=$!
  trap 'kill "$pip"; exit 130' INT TERM # a background job of a script does not get Ctrl-C by itself
  while kill -0 "$pip" 2>/dev/null; do
    [[ ! -t 1 ]] || printf '\r\033[K    %.70s' "$(grep -E '^(Collecting|Downloading|Installing)' "$log" | tail -n 1)"
    sleep 0.3
  done
  trap - INT TERM
  [[ ! -t 1 ]] || printf '\r\033[K'
  wait "$pip" || {
    tail -n 20 "$log" >&2
    die "pip could not install $*; its whole log is $log"
  }
}

# make_environment run|dev
make_environment() {
  local python packages=deploy/requirements.txt wanted_run wanted_packages wanted_project
  python=$(find_python) || exit 1
  [[ "$1" == dev ]] && packages=deploy/requirements-dev.txt
  wanted_run=$(fingerprint "$python" deploy/requirements.txt)
  wanted_packages=$(fingerprint "$python" deploy/requirements.txt "$packages")
  [[ "$1" == run ]] && wanted_packages=$wanted_run
  wanted_project=$(fingerprint "$python" pyproject.toml k*/*.[ch] k*/*/*.c services/*/*.c)
  is_current "$1" "$wanted_packages" && is_current project "$wanted_project" && return

  mkdir -p .run
  exec 9>.run/environment.lock
  flock --nonblock 9 || { say "waiting for another script that is installing"; flock 9; }
  if ! is_current "$1" "$wanted_packages"; then
    check_machine
    if [[ "$(.venv/bin/python -c 'import sys; print(sys.prefix)' 2>/dev/null)" != "$PWD/.venv" ]]; then
      say "making .venv with $("$python" --version)"
      rm -rf .venv
      "$python" -m venv .venv || die "could not make .venv; see the lines above"
    fi
    say "installing the pinned packages of $packages (about 2 GB, a minute or two; once)"
    pip_install --no-compile -r "$packages" # what is imported is compiled then; all of it would double the time
    printf '%s' "$wanted_packages" >".venv/stamp-$1"
    printf '%s' "$wanted_run" >.venv/stamp-run # dev holds all of run
  fi
  if ! is_current project "$wanted_project"; then
    say "installing epdserve from this folder, editable"
    pip_install --no-deps --no-build-isolation -e .
    printf '%s' "$wanted_project" >.venv/stamp-project
  fi
  exec 9>&-
}
