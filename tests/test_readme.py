"""Runs the README's examples: every line that begins with $ in a console block is run, from the project's folder, and
prints what the README says it prints. Numbers may differ by 5 % (other BLAS kernels round otherwise); a line of ... stands
for any lines."""
import os
import re
import subprocess
import tempfile

import tap

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
BUILD = os.environ.get("B", "build/opt")


def examples():
    """(command, expected lines) in the order of the file."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        blocks = re.findall(r"^```console\n(.*?)^```$", file.read(), re.S | re.M)
    for block in blocks:
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            lines = part.rstrip("\n").split("\n")
            n = 1
            while lines[n - 1].endswith("\\"):
                n += 1
            yield " ".join(line.rstrip("\\").strip() for line in lines[:n]), lines[n:]


def alike(want, got):
    """Same words and columns' order; numbers within 5 %, or of rounding alone."""
    if NUMBER.sub("#", " ".join(want.split())) != NUMBER.sub("#", " ".join(got.split())):
        return False
    return all(abs(float(a) - float(b)) <= 0.05 * max(abs(float(a)), abs(float(b))) + 1e-3
               for a, b in zip(NUMBER.findall(want), NUMBER.findall(got)))


def matches(want, got):
    if not want:
        return not got
    if want[0].strip() == "...":
        return any(matches(want[1:], got[i:]) for i in range(len(got) + 1))
    if not got or not matches(want[1:], got[1:]):
        return False
    if want[0].endswith("..."):  # the rest of the line differs from run to run
        start = want[0][:-3]
        return alike(start, got[0][:len(start)])
    return alike(want[0], got[0])


def test_comparing():
    """README: the comparison itself sees other words, other numbers, missing and extra lines"""
    assert matches(["a 1.00", "..."], ["a 1.01", "b", "c"])
    assert not matches(["a 1.00"], ["a 1.20"])
    assert not matches(["a 1.00"], ["b 1.00"])
    assert not matches(["a"], ["a", "b"])
    assert not matches(["a", "b"], ["a"])


def test_examples():
    """README: the examples print what it says"""
    ran = 0
    for command, want in examples():
        done = subprocess.run(command.replace("build/lowkey", f"{BUILD}/lowkey"), shell=True, cwd=ROOT,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
        got = done.stdout.rstrip("\n").split("\n") if done.stdout.strip() else []
        assert done.returncode == 0, f"{command}: exit {done.returncode}: {done.stdout}"
        assert matches(want, got), f"{command}\nwanted:\n" + "\n".join(want) + "\ngot:\n" + "\n".join(got)
        ran += 1
    assert ran >= 4, f"only {ran} examples found"


def test_program():
    """README: the program compiles without warnings and runs"""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        programs = re.findall(r"^```c\n(.*?)^```$", file.read(), re.S | re.M)
    assert len(programs) == 1
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "example.c"), os.path.join(folder, "example")
        with open(source, "w", encoding="utf-8") as file:
            file.write(programs[0])
        sanitize = "-fsanitize=address,undefined" if os.environ.get("SAN") == "1" else ""
        subprocess.run(f"cc -std=c11 -Wall -Wextra -Werror {sanitize} -I. -o {program} {source} {BUILD}/liblowkey.a "
                       "$(pkg-config --libs hdf5 libcrypto) -lm", shell=True, cwd=ROOT, check=True)
        done = subprocess.run([program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert alike("scalar attends over 100 tokens; 2.14 bits an element", done.stdout), done.stdout


tap.run(globals())
