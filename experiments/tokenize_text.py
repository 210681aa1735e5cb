#!/usr/bin/env python3
"""A text to tokens.h5 (formats/README.md, "tokens.h5") with the model's own tokenizer.

    tokenize_text.py MODEL.gguf TEXT OUT.tokens.h5
    tokenize_text.py TOKENIZER TEXT OUT.tokens.h5      tokenizer.json, or a folder that holds one
    tokenize_text.py TOKENIZER TEXT... OUT.tokens.h5 --sequence N      a mixture

The whole text is one sequence, or with --sequence N sequences of N tokens (what is left over at the end is not
used; with --add-bos each begins with the BOS token, which models like Gemma cannot do without). It is tokenized as
it stands; bytes that are no UTF-8 are refused. Of several texts sequences are taken in turn, one of each, until one
text has no more: equal shares, however many samples are then used. From GGUF the
tokenizer is built anew, of two kinds: byte-level BPE out of tokens, merges and the name of the pre-tokenizer, and
SentencePiece's BPE (Gemma) out of tokens and their scores.
"""
import argparse
import os

import h5py
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from artefact import Refused, need, run, set_schema, sha256, whole_file
from convert_model import load_json, open_gguf, token_id

# How Llama 3 and Qwen 2 cut a text before merging; they differ in how many digits stay together.
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
         r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
NORMAL = 1                     # token types in GGUF
CONTROL, USER_DEFINED = 3, 4   # matched in the text before it is cut
SPACE = "\u2581"               # how SentencePiece writes a space


def pre_tokenizer(name):
    """The pre-tokenizer that GGUF knows by this name, or None."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def cut(pattern):
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_alone])
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in ("llama-bpe", "llama3", "llama-v3"):
        return cut(WORDS % "{1,3}")
    if name == "qwen2":
        return cut(WORDS % "")
    return None


def byte_level_tokenizer(path, field, tokens, pre):
    cutter = pre_tokenizer(pre)
    need(cutter, f"{path}: pre-tokenizer '{pre}' is not one of gpt-2, smollm, llama-bpe, qwen2; use the"
         " model's tokenizer.json")
    merges = field("tokenizer.ggml.merges")
    need(merges, f"{path}: merges are missing")
    tokenizer = Tokenizer(bpe_of(path, tokens, [tuple(merge.split(" ")) for merge in merges],
                                 ignore_merges=pre in ("llama-bpe", "llama3", "llama-v3")))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = cutter, decoders.ByteLevel()
    return tokenizer


def bpe_of(path, tokens, merges, **options):
    vocabulary = {token: i for i, token in enumerate(tokens)}
    need(len(vocabulary) == len(tokens), f"{path}: the vocabulary holds a token twice")
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as why:  # the library raises Exception itself
        raise Refused(f"{path}: tokens and merges make no tokenizer: {why}") from None


def merges_of(tokens, types, scores):
    """SentencePiece joins the two neighbours whose joint piece has the highest score; here every pair of pieces that
    make a piece, in that order."""
    normal = [i for i, kind in enumerate(types) if kind == NORMAL]
    known = {tokens[i]: i for i in normal}
    merges = []
    for i in sorted(normal, key=lambda i: -scores[i]):
        piece = tokens[i]
        merges += [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))
                   if piece[:cut] in known and piece[cut:] in known]
    return merges


def sentence_piece_tokenizer(path, field, tokens, types):
    """Spaces become a character, the text is not cut before merging, what no piece spells is spelled in bytes."""
    scores, unknown = field("tokenizer.ggml.scores"), field("tokenizer.ggml.unknown_token_id", -1)
    need(scores and len(scores) == len(tokens), f"{path}: scores are missing")
    need(not field("tokenizer.ggml.add_space_prefix", True),
         f"{path}: a tokenizer that puts a space before the text (add_space_prefix) is not supported; use the"
         " model's tokenizer.json")
    need(0 <= unknown < len(tokens), f"{path}: names no unknown token")
    tokenizer = Tokenizer(bpe_of(path, tokens, merges_of(tokens, types, scores), byte_fallback=True,
                                 fuse_unk=True, unk_token=tokens[unknown]))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(),
                                           decoders.Fuse()])
    return tokenizer


def tokenizer_from_gguf(path):
    """(tokenizer, its name, id of the BOS token or -1)"""
    _, field = open_gguf(path)
    kind, pre = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre", "none named")
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    need(kind in ("gpt2", "llama"), f"{path}: tokenizer model '{kind}' is not gpt2 (byte-level BPE) or llama"
         " (SentencePiece's BPE); use the model's tokenizer.json")
    need(tokens and types and len(types) == len(tokens), f"{path}: tokens or token_type are missing")
    tokenizer = byte_level_tokenizer(path, field, tokens, pre) if kind == "gpt2" else \
        sentence_piece_tokenizer(path, field, tokens, types)
    whole = [(token, type_) for token, type_ in zip(tokens, types) if type_ in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=type_ == CONTROL)
                          for token, type_ in whole])
    need(tokenizer.get_vocab_size() == len(tokens), f"{path}: special tokens outside the vocabulary")
    name = field("general.name", os.path.basename(path))
    return tokenizer, f"{name} ({kind}, {pre})", field("tokenizer.ggml.bos_token_id", -1)


def tokenizer_from_json(path):
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    load_json(path)
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as why:  # the library raises Exception itself
        raise Refused(f"{path}: no readable tokenizer.json: {why}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    folder = os.path.dirname(os.path.abspath(path))
    config = os.path.join(folder, "config.json")
    bos = token_id(load_json(config), "bos_token_id") if os.path.exists(config) else -1
    return tokenizer, os.path.basename(folder), bos


def in_sequences(ids, bos, length):
    """The tokens and the sequences' offsets; bos None: without; length None: one sequence."""
    head = [] if bos is None else [bos]
    if length is None:
        return head + ids, [0, len(head) + len(ids)]
    step = length - len(head)
    starts = range(0, len(ids) - step + 1, step)
    return [token for start in starts for token in head + ids[start:start + step]], \
        [i * length for i in range(len(starts) + 1)]


def mixed(ids_of_texts, bos, length):
    """As in_sequences, of several texts in turn, as many of each as the shortest has."""
    cut = [in_sequences(ids, bos, length) for ids in ids_of_texts]
    n = min(len(offsets) - 1 for _, offsets in cut)
    return [token for i in range(n) for ids, offsets in cut for token in ids[offsets[i]:offsets[i + 1]]], \
        [i * (length or 0) for i in range(n * len(cut) + 1)] if len(cut) > 1 else cut[0][1]


def read_text(path):
    with open(path, "rb") as file:
        text = file.read()
    try:
        return text, text.decode("utf-8")
    except UnicodeDecodeError as why:
        raise Refused(f"{path}: byte {why.start} is no UTF-8") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     epilog="Exit status: 0 good, 1 failed, 2 wrong usage.")
    parser.add_argument("tokenizer", help="a GGUF file, a tokenizer.json, or a folder with one")
    parser.add_argument("text", nargs="+", help="UTF-8 text")
    parser.add_argument("out", help="tokens.h5 to write")
    parser.add_argument("--add-bos", action="store_true",
                        help="begin each sequence with the model's BOS token (default: without)")
    parser.add_argument("--sequence", type=int, metavar="N",
                        help="cut into sequences of N tokens, BOS included (default: one)")
    parser.add_argument("--name", help="tokenizer name to write (default: the model's)")
    options = parser.parse_args()
    if options.sequence is not None and options.sequence < 2:
        parser.error("--sequence: expected at least 2")
    if len(options.text) > 1 and options.sequence is None:
        parser.error("several texts are mixed by sequences: --sequence is needed")

    source = tokenizer_from_gguf if options.tokenizer.endswith(".gguf") else tokenizer_from_json
    tokenizer, name, bos = source(options.tokenizer)
    texts = [read_text(path) for path in options.text]
    encoded = [tokenizer.encode(decoded, add_special_tokens=False).ids for _, decoded in texts]
    need(not options.add_bos or 0 <= bos < tokenizer.get_vocab_size(), f"{options.tokenizer}: names no BOS token")
    ids, offsets = mixed(encoded, bos if options.add_bos else None, options.sequence)
    need(ids, f"{' '.join(options.text)}: holds no tokens" +
         (f" for a sequence of {options.sequence}" if options.sequence else ""))
    ids = np.array(ids, np.int32)

    def verify(temporary):
        with h5py.File(temporary) as file:
            need(np.array_equal(file["tokens"][...], ids), f"{temporary}: was not read back as written")

    with whole_file(options.out, verify) as file:
        set_schema(file, "tokens")
        file.attrs["tokenizer"] = options.name or name
        file.attrs["tokenizer_sha256"] = sha256(tokenizer.to_str().encode("utf-8"))
        file.attrs["vocab_size"] = tokenizer.get_vocab_size()
        file.attrs["text_name"] = "+".join(map(os.path.basename, options.text))
        file.attrs["text_sha256"] = sha256(b"".join(text for text, _ in texts))
        file.attrs["add_bos"] = int(options.add_bos)
        file.create_dataset("tokens", data=ids, track_times=False)
        file.create_dataset("sequence_offsets", data=np.array(offsets, np.int64), track_times=False)
    print(f"{options.out}: {len(ids)} tokens, first {' '.join(map(str, ids[:10]))}")


if __name__ == "__main__":
    run(main)
