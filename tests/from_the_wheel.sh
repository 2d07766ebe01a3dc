# Source this file from another script. It builds the wheel, and installs the wheel without dependencies in a temporary
# folder. Then it changes to this folder and disables downloads.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
here="$(mktemp -d)"
trap 'rm -rf "$here"' EXIT
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps "$root" --wheel-dir "$here"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$here/installed" "$here"/lightning_fcl-*.whl
cd "$here"
export PYTHONPATH="$here/installed" LIGHTNING_FCL_CACHE="$here/cache" LIGHTNING_FCL_OFFLINE=1
unset LIGHTNING_FCL_ZOO LIGHTNING_FCL_DATA
