#!/usr/bin/env python3
"""Texts that are not WikiText, out of packages, in two parts that share no file: one to fit on, one to evaluate on.

    texts.py novels RDATA.rdb FIT.txt EVAL.txt      the novels that R's package janeaustenr holds
    texts.py code WHEEL FIT.txt EVAL.txt            the Python sources of a package, without its tests

Files, by name, go to the two parts in turn; each part ends before it would be longer than PART_BYTES.
"""
import argparse
import os
import struct
import zipfile
import zlib

from artefact import need, run

PART_BYTES = 2_400_000


def strings_of(serialised, path):
    """The character vector that R serialised (XDR, version 3)."""
    need(serialised[:2] == b"X\n" and serialised[2:6] == struct.pack(">i", 3), f"{path}: no serialised R object")
    encoding, = struct.unpack_from(">i", serialised, 14)
    at = 18 + encoding
    kind, n = struct.unpack_from(">ii", serialised, at)
    need(kind & 0xff == 16, f"{path}: holds an R object that is no character vector")
    at, lines = at + 8, []
    for _ in range(n):
        _, size = struct.unpack_from(">ii", serialised, at)
        lines.append(serialised[at + 8:at + 8 + max(size, 0)].decode("utf-8"))
        at += 8 + max(size, 0)
    return lines


def novels(path):
    """Title and text of each: R's lazy-load file is one deflated object after the other, their sizes in front."""
    with open(path, "rb") as file:
        rest = file.read()
    while rest:
        size, = struct.unpack_from(">I", rest)
        stream = zlib.decompressobj()
        serialised = stream.decompress(rest[4:])
        need(stream.eof and len(serialised) == size, f"{path}: a damaged object")
        rest = stream.unused_data
        lines = strings_of(serialised, path)
        yield lines[0], "\n".join(lines) + "\n"


def sources(path):
    """Name and text of each Python file."""
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if name.endswith(".py") and "/tests/" not in name:
                yield name, wheel.read(name).decode("utf-8")


def write_parts(texts, paths):
    parts = [[], []]
    for i, (_, text) in enumerate(sorted(texts)):
        part = parts[i % 2]
        if sum(len(t.encode()) for t in part) + len(text.encode()) <= PART_BYTES:
            part.append(text)
    for part, path in zip(parts, paths):
        need(part, f"{path}: would be empty")
        with open(f"{path}.tmp", "w", encoding="utf-8", newline="") as file:
            file.write("".join(part))
        os.replace(f"{path}.tmp", path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog="Exit status: 0 good, 1 failed, 2 wrong usage.")
    parser.add_argument("kind", choices=("novels", "code"))
    parser.add_argument("source")
    parser.add_argument("fit", help="text to write, to fit on")
    parser.add_argument("eval", help="text to write, to evaluate on")
    options = parser.parse_args()
    write_parts((novels if options.kind == "novels" else sources)(options.source), (options.fit, options.eval))


if __name__ == "__main__":
    run(main)
