#!/bin/bash
# What a newcomer's machine does: a clean clone of HEAD in a fresh Debian 12 that has make and git and nothing else, then
# `make demo` and `make test`, each timed. Root only; needs debootstrap. Prints the two times and keeps the logs.
#   fresh_debian.sh [FOLDER] [TARGET...]     default: /tmp/lowkey-fresh demo test
# A mirror other than Debian's own is taken from MIRROR; the host's certificates and proxy settings are handed in.
set -eu
root=${1:-/tmp/lowkey-fresh}
shift || true
[ $# -gt 0 ] || set -- demo test
[ "$(id -u)" = 0 ] || { echo "fresh_debian: root only" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "fresh_debian: needs debootstrap" >&2; exit 1; }
source=$(cd "$(dirname "$0")/.." && pwd)

rm -rf --one-file-system "$root"
debootstrap --variant=minbase --include=make,git,ca-certificates bookworm "$root" "${MIRROR:-http://deb.debian.org/debian}" >/dev/null
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
cp /etc/resolv.conf "$root/etc/resolv.conf" 2>/dev/null || true
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
trap 'umount -l "$root/dev" "$root/proc"' EXIT
git clone -q "$source" "$root/lowkey"

settings=$(env | grep -E '^(https?_proxy|no_proxy|HTTPS?_PROXY|NO_PROXY|PIP_CERT|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|OPENBLAS_CORETYPE|OPENBLAS_L2_SIZE)=' || true)
status=0
for target in "$@"; do
    start=$SECONDS
    # shellcheck disable=SC2086
    if chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 $settings \
        make --no-print-directory -C /lowkey "$target" >"$root/$target.log" 2>&1; then
        result=passed
    else
        result=failed status=1
    fi
    echo "make $target: $result in $((SECONDS - start)) s: $(tail -n 1 "$root/$target.log")"
done
exit $status
