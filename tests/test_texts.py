"""texts.py: novels out of R's lazy-load file, sources out of a wheel, parts that share no file; mixtures of texts."""
import os
import shutil
import struct
import sys
import tempfile
import zipfile
import zlib

import h5py

import tap

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, f"{ROOT}/experiments")
import texts  # noqa: E402
import tokenize_text  # noqa: E402
from in_process import call  # noqa: E402

WORK = tempfile.mkdtemp()
GGUF = f"{ROOT}/build/model/SmolLM2-135M-Instruct.Q4_1.gguf"
FIT, EVAL = f"{WORK}/fit.txt", f"{WORK}/eval.txt"


def character_vector(lines):
    body = b"".join(struct.pack(">ii", 0x40009, len(line.encode())) + line.encode() for line in lines)
    head = b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8"
    return head + struct.pack(">ii", 16, len(lines)) + body


def lazy_load(objects):
    path = tempfile.mktemp(".rdb", dir=WORK)
    with open(path, "wb") as file:
        for serialised in objects:
            file.write(struct.pack(">I", len(serialised)) + zlib.compress(serialised))
    return path


def wheel(**files):
    path = f"{WORK}/p.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, content in files.items():
            file.writestr(name.replace("__", "/").replace("_py", ".py"), content)
    return path


def parts(kind, source):
    status, errors = call(texts, kind, source, FIT, EVAL)
    assert status == 0, errors
    return [open(path, encoding="utf-8").read() for path in (FIT, EVAL)]


def test_novels():
    """novels go by title to the two parts in turn, line by line as they are"""
    path = lazy_load(character_vector(lines) for lines in (["B", "", "caf\u00e9"], ["C", "c"], ["A", "x y"]))
    assert parts("novels", path) == ["A\nx y\nC\nc\n", "B\n\ncaf\u00e9\n"]


def test_code():
    """Python files go by name to the parts in turn; tests and other files stay out"""
    path = wheel(p__b_py="b = 1\n", p__a_py="a = 1\n", p__tests__t_py="no\n", p__c_py="c = 1\n", README="no\n")
    assert parts("code", path) == ["a = 1\nc = 1\n", "b = 1\n"]


def test_limit():
    """a file that would make a part too long is left out"""
    path = wheel(p__a_py="#" * texts.PART_BYTES, p__b_py="b\n", p__c_py="c\n", p__d_py="d\n")
    assert parts("code", path) == ["#" * texts.PART_BYTES, "b\nd\n"]


def test_refusals():
    """a damaged source or one without text is refused in a line"""
    whole = character_vector(["A", "b"])
    damaged = lazy_load([whole])
    with open(damaged, "r+b") as file:
        file.truncate(os.path.getsize(damaged) - 3)
    for kind, source, words in (("novels", damaged, "damaged object"), ("novels", lazy_load([b"Y\n" + whole[2:]]), "no serialised R"),
                                ("novels", lazy_load([whole.replace(struct.pack(">i", 16), struct.pack(">i", 13), 1)]), "no character vector"),
                                ("code", wheel(p__a_py="a\n"), "would be empty"), ("novels", f"{WORK}/none", "No such file")):
        for path in (FIT, EVAL):
            if os.path.exists(path):
                os.remove(path)
        status, errors = call(texts, kind, source, FIT, EVAL)
        assert status == 1 and words in errors and len(errors.splitlines()) == 1, (words, errors)


def test_mixture():
    """several texts are mixed sequence by sequence in turn, as many of each as the shortest has"""
    paths = []
    for name, text in (("a", "1" * 11), ("b", "2" * 7), ("c", "3" * 100)):
        paths.append(f"{WORK}/{name}")
        with open(paths[-1], "w", encoding="utf-8") as file:
            file.write(text)
    out = f"{WORK}/t.h5"
    status, errors = call(tokenize_text, GGUF, *paths, out, "--sequence", "3")
    assert status == 0, errors
    tokenizer, _, _ = tokenize_text.tokenizer_from_gguf(GGUF)
    with h5py.File(out) as file:
        ids, offsets = file["tokens"][...].tolist(), file["sequence_offsets"][...].tolist()
        assert file.attrs["text_name"] == "a+b+c"
        assert file.attrs["text_sha256"] == tokenize_text.sha256(b"1" * 11 + b"2" * 7 + b"3" * 100)
    assert tokenizer.decode(ids) == "111222333" * 2 and offsets == list(range(0, 19, 3))
    status, errors = call(tokenize_text, GGUF, *paths, out)
    assert status == 2


def test_real_texts():
    """the texts that were fetched have the known numbers of tokens"""
    for name, count in (("prose.fit", 443221), ("prose.eval", 552281), ("code.fit", 486335), ("code.eval", 480591),
                        ("licences.eval", 25906), ("mixture.fit", 798720)):
        path = f"{ROOT}/build/model/{name}.tokens.h5"
        if not os.path.exists(path):
            tap.skip("no texts here (make texts)")
        with h5py.File(path) as file:
            assert len(file["tokens"]) == count, (name, len(file["tokens"]))


try:
    tap.run(globals())
finally:
    shutil.rmtree(WORK)
