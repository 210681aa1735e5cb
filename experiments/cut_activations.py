#!/usr/bin/env python3
"""Cut an activations.h5 into files of some of its samples, or put its samples in another order.

    cut_activations.py A.h5 OUT.h5 --samples 0:8        samples 0..7
    cut_activations.py A.h5 OUT.h5 --shuffle 7          all samples, shuffled by that seed
    cut_activations.py A.h5 OUT.h5 --gzip 9             deflated (after a shuffle of bytes), for small files to hand on

What a sample holds is copied bit by bit; a fit over the parts equals the fit over the whole.
"""
import argparse
import os
import random
import sys

import h5py
import numpy as np


def copy_attributes(source, target):
    for name in source.attrs:
        target.attrs.create(name, source.attrs[name], dtype=source.attrs.get_id(name).dtype)


def write(source, path, order, gzip):
    """Write the samples of `source` listed in `order` to `path`, one dataset at a time, sample by sample."""
    offsets = source["sample_offsets"][:]
    lengths = (offsets[1:] - offsets[:-1])[order]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    with h5py.File(path, "w", track_order=False) as out:
        copy_attributes(source, out)
        out.create_dataset("layer_index", data=source["layer_index"][:], track_times=False)
        out.create_dataset("sample_offsets", data=starts.astype(np.int64), track_times=False)
        out.create_dataset("sample_sha256", data=source["sample_sha256"][:][order], track_times=False)
        for name, layer in source["layers"].items():
            group = out.create_group(f"layers/{name}")
            copy_attributes(layer, group)
            for stream, data in layer.items():
                if stream == "rope_inv_freq":
                    group.create_dataset(stream, data=data[:], dtype=data.dtype, track_times=False)
                    continue
                settings = dict(compression=data.compression, compression_opts=data.compression_opts,
                                shuffle=data.shuffle)
                chunks = data.chunks and (min(data.chunks[0], int(starts[-1])),) + data.chunks[1:]
                if gzip is not None:  # chunks of a sample: each is deflated once
                    settings = dict(compression="gzip", compression_opts=gzip, shuffle=True)
                    chunks = (int(lengths.min()), 1, data.shape[2])
                rows = group.create_dataset(stream, (int(starts[-1]),) + data.shape[1:], data.dtype,
                                            chunks=chunks,
                                            track_times=False, **settings)
                copy_attributes(data, rows)
                for i, sample in enumerate(order):
                    rows[starts[i]:starts[i + 1]] = data[offsets[sample]:offsets[sample + 1]]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--samples", default=":", metavar="FIRST:END")
    parser.add_argument("--shuffle", type=int, metavar="SEED")
    parser.add_argument("--gzip", type=int, metavar="LEVEL", choices=range(1, 10))
    options = parser.parse_args()
    try:
        first, end = options.samples.split(":")
        with h5py.File(options.source, "r") as source:
            n = len(source["sample_offsets"]) - 1
            order = list(range(int(first or 0), int(end or n)))
            if not order or order[0] < 0 or order[-1] >= n:
                sys.exit(f"cut_activations: {options.source}: --samples {options.samples}: the file has samples 0:{n}")
            if options.shuffle is not None:
                random.Random(options.shuffle).shuffle(order)
            temporary = f"{options.out}.{os.getpid()}.tmp"
            try:
                write(source, temporary, order, options.gzip)
                os.replace(temporary, options.out)
            finally:
                if os.path.exists(temporary):
                    os.remove(temporary)
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"cut_activations: {options.source}: {error}")


if __name__ == "__main__":
    main()
