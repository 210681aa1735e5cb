#!/bin/sh
# Texts that are not WikiText-2, each in a part to fit on and a part to evaluate on (experiments/texts.py), none committed:
#   prose     six novels by Jane Austen (public domain), from the Debian package r-cran-janeaustenr (the package: MIT)
#   code      the Python sources of networkx 3.2.1 (BSD-3-Clause), from the Python package index
#   licences  GPL-3, LGPL-2.1, GFDL-1.3, Apache-2.0, MPL-2.0, Artistic (verbatim copies may be distributed), from the
#             Debian package base-files; evaluation only
#   fetch_texts.sh PYTHON FOLDER
set -eu
python=$1 out=$2
mkdir -p "$out"
work=$(mktemp -d "$out/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
here=$(dirname "$0")/..

echo "fetch: r-cran-janeaustenr, base-files (Debian), networkx 3.2.1 (Python package index)" >&2
(cd "$work" && apt-get -qq download r-cran-janeaustenr base-files 2>errors) || {
    cat "$work/errors" >&2
    echo "fetch: apt-get cannot download r-cran-janeaustenr and base-files (apt-get update first?)" >&2
    exit 1
}
for package in "$work"/*.deb; do dpkg-deb -x "$package" "$work"; done
"$python" -m pip download -q --disable-pip-version-check --no-deps --dest "$work" networkx==3.2.1
"$python" "$here/experiments/texts.py" novels "$work/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb" \
    "$work/prose.fit.txt" "$work/prose.eval.txt"
"$python" "$here/experiments/texts.py" code "$work"/networkx-*.whl "$work/code.fit.txt" "$work/code.eval.txt"
for licence in GPL-3 LGPL-2.1 GFDL-1.3 Apache-2.0 MPL-2.0 Artistic; do
    cat "$work/usr/share/common-licenses/$licence"
done >"$work/licences.eval.txt"

# The same text for everybody, or none.
(cd "$work" && sha256sum --quiet -c - >&2) <<'SUMS'
bc8c92a703bdaaf4af8902a333ede737c8dd0193f8b9ace177d375bc7307f596  code.eval.txt
90f9686d9f22d2ba3d4d843b38330a6bfa2ec95438cb687259f0e5c7a42f23a5  code.fit.txt
d323aa46a3893f8d2f04f3eb1ebb3d6ab146df5e9f1d95711e30b77321d5926d  licences.eval.txt
c7cf6f27cc3fad3346b4b2a9cca6794b5930744194920876bac465620deecece  prose.eval.txt
cf99113f17d8232ce78c3b4fae6214d92e8ac7931b3dd95fec6b1157a08a06e6  prose.fit.txt
SUMS
mv "$work"/*.txt "$out"
