#!/bin/sh
# Install what the build needs and this machine lacks; says what in one line, and does nothing where nothing is missing.
#   setup.sh packages                      Debian packages (root or sudo)
#   setup.sh python REQUIREMENTS FOLDER    a Python environment with the pinned packages
set -eu

packages="gcc g++ make pkg-config libc6-dev libhdf5-dev libopenblas-dev libgsl-dev libssl-dev libjansson-dev libcmocka-dev python3 python3-venv ca-certificates"

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

case "${1:-}" in
packages)
    missing=
    for package in $packages; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
    done
    [ -n "$missing" ] || exit 0
    echo "setup: installing Debian packages:$missing" >&2
    if [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then
        echo "setup: needs root or sudo; as root: apt-get install$missing" >&2
        exit 1
    fi
    as_root apt-get -qq update
    # shellcheck disable=SC2086
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $missing >/dev/null
    ;;
python)
    echo "setup: Python environment $3 from $2" >&2
    python3 -m venv "$3"
    "$3/bin/python" -m pip install -q --disable-pip-version-check -r "$2"
    ;;
*)
    echo "usage: setup.sh packages | python REQUIREMENTS FOLDER" >&2
    exit 2
    ;;
esac
