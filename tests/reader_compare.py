"""One sequence of a C cache (lowkey_ctypes.Cache) against the independent packer, decoder and attention."""
import numpy as np

import reader_pages as pages
from reader_attention import attend


def same_bits(got, want, what):
    differ = got.view(np.uint32) != want.view(np.uint32)
    assert not differ.any(), f"{what}: {differ.sum()} differ, first {np.argwhere(differ)[0]}: " \
                             f"{got[tuple(np.argwhere(differ)[0])]!r}, expected {want[tuple(np.argwhere(differ)[0])]!r}"


def same_page(got, page, what):
    want, mask = (np.frombuffer(b, np.uint8) for b in page)
    assert len(got) == len(want), f"{what}: {len(got)} bytes, expected {len(want)}"
    differ = np.flatnonzero((np.frombuffer(got, np.uint8) ^ want) & mask)
    i = differ[0] if len(differ) else 0
    assert not len(differ), f"{what}: {len(differ)} bytes differ, first {i}: {got[i]:#x}, expected {want[i]:#x}"


def expected(q, side, x):
    """The packed tokens, and what a reader of the cache gets: sinks from 16 bits, the rest from codes."""
    packed = pages.pack(side, x, q.n_sink_tokens)
    codes, over = pages.encode(x[:packed.first], q.sink_rule)
    packed.values[:packed.first] = pages.decode(codes, q.sink_rule)
    packed.n_saturated += int(over.sum())
    return packed


def compare_side(cache, q, layer, number, packed, got, sequence, what):
    """Bytes of all pages against the packer; values against the decoder of those bytes."""
    side = packed.side
    same_bits(got, packed.values, f"{what}: values")
    for page in range((packed.T + 63) // 64):
        heads = [cache.page(layer.index, page, number, h, sequence) for h in range(side.H)]
        for h in range(side.H):
            same_page(heads[h], pages.page_of(packed, page, h), f"{what}: page {page} head {h}")
        side_page = cache.page(layer.index, page, number, -1, sequence)
        same_page(side_page, pages.side_page_of(packed, page), f"{what}: side page {page}")
        live = pages.live_slots(packed, page)
        if len(live):
            same_bits(pages.decode_page(side, heads, side_page, live), got[page * 64 + live],
                      f"{what}: decoded page {page}")


def append_in_cuts(cache, index, keys, values, cuts, sequence):
    for a, b in zip([0, *cuts], [*cuts, len(keys)]):
        if b > a:
            cache.append(index, keys[a:b].copy(), values[a:b].copy(), sequence)


def compare_sequence(cache, q, layer, keys, values, cuts, sequence, what, held=0):
    """Append keys and values behind the held tokens, which are the first of them, and compare all."""
    cache.reserve(len(keys) - held, sequence)
    append_in_cuts(cache, layer.index, keys[held:], values[held:], [c - held for c in cuts if c > held], sequence)
    want = expected(q, layer.key, keys), expected(q, layer.value, values)
    got = cache.read(layer.index, keys.shape[1:], values.shape[1:], 0, len(keys), sequence)
    for number, name in enumerate(("keys", "values")):
        compare_side(cache, q, layer, number, want[number], got[number], sequence, f"{what}: {name}")
    return want


def compare_attention(cache, layer, keys, values, rng, sequence, what):
    n = min(3, len(keys))
    q = np.float32(rng.normal(size=(n, layer.n_q_heads, layer.key_head_dim)) / (np.abs(keys).mean() + 1e-30))
    out, lse = cache.attend(layer.index, q, layer.value_head_dim, sequence)
    want, bound, want_lse = attend(layer, keys, values, q)
    worst = (np.abs(out - want) / bound).max()
    assert worst <= 1, f"{what}: attention is {worst} times its bound away"
    assert np.abs(want - want.mean()).max() > 50 * bound.min(), f"{what}: the bound tells nothing here"
    assert np.allclose(lse, want_lse, rtol=1e-5, atol=1e-3), f"{what}: lse"
