"""tokenize_text.py: known counts and ids, the text comes back from the tokens, both kinds of tokenizer, refusals."""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

import gguf
import h5py
import numpy as np

import tap

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, f"{ROOT}/experiments")
import tokenize_text  # noqa: E402
from in_process import call  # noqa: E402

LOWKEY = f"{ROOT}/{os.environ.get('B', 'build/opt')}/lowkey"
WORK = tempfile.mkdtemp()
GGUF = f"{ROOT}/build/model/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = f"{ROOT}/experiments/data/wikitext-2"


def write(name, content):
    path = f"{WORK}/{name}"
    with open(path, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    return path


def tokens_of(text, *options, tokenizer=GGUF):
    status, errors = call(tokenize_text, tokenizer, write("text", text), f"{WORK}/t.h5", *options)
    assert status == 0, errors
    with h5py.File(f"{WORK}/t.h5") as file:
        return file["tokens"][...].tolist()


def byte_of():
    """The character by which byte-level BPE writes each byte -> that byte: printable ones stand for themselves, the others
    for the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(others)}}


def test_known_counts():
    """the texts give the known counts and first ids, and hold identity and offsets"""
    for split, count, first in (("test", 303415, [3717, 446, 6356, 389, 9226, 352, 446, 3717, 3717, 6356]),
                                ("valid", 266981, None)):
        with h5py.File(f"{ROOT}/build/model/wiki.{split}.tokens.h5") as file, open(f"{TEXTS}/wiki.{split}.raw", "rb") as text:
            assert len(file["tokens"]) == count
            assert first is None or file["tokens"][:10].tolist() == first
            assert file["sequence_offsets"][...].tolist() == [0, count]
            assert file.attrs["text_sha256"] == hashlib.sha256(text.read()).hexdigest()
            want = dict(schema="tokens", vocab_size=49152, add_bos=0, text_name=f"wiki.{split}.raw",
                        tokenizer="SmolLM2-135M-Instruct")
            assert {k: file.attrs[k] for k in want} == want


def test_text_comes_back():
    """every byte of a text comes back from the tokens by the model's vocabulary alone"""
    vocabulary, bytes_of = gguf.GGUFReader(GGUF).get_field("tokenizer.ggml.tokens").contents(), byte_of()
    with h5py.File(f"{ROOT}/build/model/wiki.test.tokens.h5") as file, open(f"{TEXTS}/wiki.test.raw", "rb") as text:
        assert bytes(bytes_of[c] for token in file["tokens"] for c in vocabulary[token]) == text.read()


def test_digits_and_specials():
    """digits stand alone, special tokens are found in the text, --add-bos puts the model's own in front"""
    plain = tokens_of("In 1984 <|im_start|>x")
    assert plain.count(1) == 1 and len(tokens_of("1984")) == 4, plain
    assert tokens_of("In 1984 <|im_start|>x", "--add-bos") == [1, *plain]
    with h5py.File(f"{WORK}/t.h5") as file:
        assert file.attrs["add_bos"] == 1


def test_tokenizer_json():
    """a tokenizer.json, by itself or in a folder, gives the same ids, and the same file twice is the same bytes"""
    text = open(f"{TEXTS}/wiki.valid.raw",
                encoding="utf-8").read()[:20000] + "\r\n \t\u00e9\u4e16\u754c 12.5e3 don't"
    tokenizer, _, _ = tokenize_text.tokenizer_from_gguf(GGUF)
    os.makedirs(f"{WORK}/hf", exist_ok=True)
    path = write("hf/tokenizer.json", tokenizer.to_str())
    write("hf/config.json", json.dumps(dict(bos_token_id=1)))
    want = tokens_of(text)
    before = open(f"{WORK}/t.h5", "rb").read()
    tokens_of(text)
    assert open(f"{WORK}/t.h5", "rb").read() == before
    for source in (path, f"{WORK}/hf"):
        assert tokens_of(text, tokenizer=source) == want
        assert tokens_of(text, "--add-bos", tokenizer=source) == [1, *want]


def test_pre_tokenizers():
    """the pre-tokenizers that GGUF names cut words, digits and line ends as their models do"""
    def cut(name, text):
        return [piece.replace("\u0120", " ").replace("\u010a", "\n")
                for piece, _ in tokenize_text.pre_tokenizer(name).pre_tokenize_str(text)]
    text = "They'LL see 12345 x+=1;\n\n ok"
    assert cut("gpt-2", text) == ["They", "'", "LL", " see", " 12345", " x", "+=", "1", ";", "\n\n", " ok"]
    assert cut("smollm", text) == ["They", "'", "LL", " see", " ", "1", "2", "3", "4", "5", " x", "+=", "1",
                                   ";", "\n\n", " ok"]
    assert cut("llama-bpe", text) == ["They", "'LL", " see", " ", "123", "45", " x", "+=", "1", ";\n\n",
                                      " ok"]
    assert cut("qwen2", text) == ["They", "'LL", " see", " ", "1", "2", "3", "4", "5", " x", "+=", "1",
                                  ";\n\n", " ok"]
    assert tokenize_text.pre_tokenizer("other") is None


def tiny_gguf(model="gpt2", pre="gpt-2", tokens=("a", "b", "ab"), merges=("a b",), types=(1, 1, 1)):
    path = f"{WORK}/tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    writer.add_token_merges(list(merges))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_refusals():
    """what cannot be tokenized is refused in a line with exit status 1, and no file is left"""
    good, out = write("good.txt", "abab"), f"{WORK}/refused.h5"
    status, errors = call(tokenize_text, tiny_gguf(), good, f"{WORK}/tiny.h5")
    assert status == 0 and h5py.File(f"{WORK}/tiny.h5")["tokens"][...].tolist() == [2, 2], errors
    for tokenizer, text, options, words in (
            (lambda: tiny_gguf(model="bert"), good, [], "tokenizer model 'bert' is not gpt2"),
            (lambda: tiny_gguf(pre="mystery"), good, [], "pre-tokenizer 'mystery' is not one of"),
            (lambda: tiny_gguf(tokens=("a", "a", "ab")), good, [], "holds a token twice"),
            (lambda: tiny_gguf(merges=("a c",)), good, [], "make no tokenizer"),
            (tiny_gguf, good, ["--add-bos"], "names no BOS token"),
            (lambda: f"{WORK}/none.gguf", good, [], "No such file"),
            (lambda: write("broken.json", "{"), good, [], "no JSON"),
            (lambda: write("empty.json", "{}"), good, [], "no readable tokenizer.json"),
            (tiny_gguf, write("latin1.txt", b"caf\xe9"), [], "byte 3 is no UTF-8"),
            (tiny_gguf, write("empty.txt", ""), [], "holds no tokens"),
            (tiny_gguf, f"{WORK}/none.txt", [], "none.txt: No such file")):
        status, errors = call(tokenize_text, tokenizer(), text, out, *options)
        assert status == 1 and words in errors and len(errors.splitlines()) == 1, (words, errors)
        assert not [name for name in os.listdir(WORK) if name.startswith("refused")]
    done = subprocess.run([sys.executable, f"{ROOT}/experiments/tokenize_text.py", GGUF, good],
                          capture_output=True, text=True)
    assert done.returncode == 2 and "usage:" in done.stderr


def test_ids():
    """ids are 32-bit integers in a file that lowkey check finds good"""
    with h5py.File(f"{ROOT}/build/model/wiki.test.tokens.h5") as file:
        assert file["tokens"].dtype == np.int32
    done = subprocess.run([LOWKEY, "check", f"{ROOT}/build/model/wiki.test.tokens.h5"], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr


try:
    tap.run(globals())
finally:
    shutil.rmtree(WORK)
