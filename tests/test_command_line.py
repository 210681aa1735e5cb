"""The manners that all commands share, as a user meets them: exit codes, one line of complaint, nothing on stdout on failure,
outputs that are inputs, full pipes, closed streams, another folder, an empty environment, signals."""
import hashlib
import json
import os
import signal
import subprocess
import tempfile
import time

import tap
from small_files import COMMAND, write_activations, write_model, write_tokens

LOWKEY = os.path.abspath(COMMAND)
FOLDER = tempfile.mkdtemp(prefix="lowkey_command_line_")
os.chdir(FOLDER)


def tokens_of_the_model(file):
    file.attrs["vocab_size"] = 20
    file["tokens"][...] %= 20


write_activations("act.h5")
write_model("model.h5")
write_tokens("tokens.h5", edit=tokens_of_the_model)
FIT = ["fit", "--bits", "2", "--sensitivity", "none"]
ERROR = ["error", "--activations", "act.h5", "--samples", "1:2"]
GOOD = [[*FIT, "--out", "q.h5", "act.h5"], ["inspect", "q.h5"], ["check", "q.h5"], [*ERROR, "q.h5"],
        ["eval", "--model", "model.h5", "--tokens", "tokens.h5", "--window", "8"],
        ["bench", "solve", "--points", "1000"], ["bench", "tables", "--channels", "2", "--points", "100"]]
CAPTURE = ["capture", "--model", "model.h5", "--tokens", "tokens.h5", "--length", "8", "--out"]
HELPS = [["help"], ["--help"], ["--version"], *(["help", c] for c in "capture fit error eval bench inspect check".split())]


def lowkey(*arguments, **options):
    return subprocess.run([LOWKEY, *arguments], capture_output=True, text=True, timeout=120, errors="replace", **options)


def good(*arguments, **options):
    run = lowkey(*arguments, **options)
    assert run.returncode == 0, (arguments, run.returncode, run.stderr)
    return run.stdout


def refused(status, said, *arguments, lines=1):
    run = lowkey(*arguments)
    assert run.returncode == status and run.stdout == "", (arguments, run.returncode, run.stdout)
    assert len(run.stderr.splitlines()) == lines and said in run.stderr, (arguments, run.stderr)


def content(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def test_json():
    """--json is JSON, and nothing else, of every command that takes it"""
    for arguments in GOOD:
        json.loads(good(*arguments, "--json"))
    good(*CAPTURE, "c.h5")


def test_usage():
    """Wrong usage is exit status 2, says where help is, and prints nothing on stdout"""
    for arguments, said in [
            ([], "usage"), (["nope"], "no command 'nope'"), (["help", "nope"], "no command 'nope'"), ([""], "no command ''"),
            (["fit"], "--out is missing"), (["fit", "--out", "x.h5"], "no activations"), (["fit", "--nope"], "--nope"),
            ([*CAPTURE, ""], "--out takes a file's name"),
            (["inspect"], "which file"), (["inspect", "act.h5", "act.h5"], "one file"), (["inspect", "--nope", "act.h5"], "--nope"),
            (["check"], "which file"), (["check", "--nope", "act.h5"], "--nope"), (["error"], "--activations"), (ERROR, "FORMAT"),
            (["error", "--nope"], "--nope"), (["eval"], "--model"), (["eval", "--nope"], "--nope"), (["capture"], "--model"),
            (["capture", "--nope"], "--nope"), (["bench"], "what"), (["bench", "nope"], "nope"), (["bench", "solve", "--nope"], "--nope"),
            (["bench", "solve", "x"], "takes no 'x'"), (["bench", "solve", "--weights", "w"], "--weights belongs to --input"),
            ([*CAPTURE, "c.h5", "x"], "'x' is not expected"), (["eval", "--model", "m", "--tokens", "t", "--windows", "x"], "--windows takes")]:
        run = lowkey(*arguments)
        assert run.returncode == 2 and run.stdout == "" and said in run.stderr, (arguments, run)


def test_numbers():
    """Numbers that are none, or out of range, are refused by option and value"""
    for option in ("--bits", "--sinks", "--queries", "--threads", "--damp", "--outliers", "--weight-clip", "--weight-floor",
                   "--outlier-cap", "--outlier-page", "--scale-block", "--samples"):
        for value in ("", "-1", "nan", "inf", "1e400", "9" * 40, "-" + "9" * 40, "1 ", "abc", "2:1"):
            refused(2, f"{option} takes ", *FIT, option, value, "--out", "x.h5", "act.h5")
    for command, option in [(ERROR, "--queries"), (ERROR, "--threads"), (["eval"], "--window"), (["eval"], "--windows"),
                            (["capture"], "--length"), (["capture"], "--stride"), (["capture"], "--per-file"),
                            (["bench", "solve"], "--points"), (["bench", "solve"], "--centroids"), (["bench", "solve"], "--repeat"),
                            (["bench", "tables"], "--channels")]:
        for value in ("", "0", "-1", "nan", "0x10", "1.5", "99999999999999999999"):
            refused(2, f"{option} takes ", *command, option, value)
    assert not os.path.exists("x.h5")


def test_ignored_options():
    """An option that would change nothing is refused, not ignored"""
    for arguments, said in [(["--scale-block", "8"], "a scale block belongs to a token scale"),
                            (["--value-outlier-cap", "2"], "values: a cap or a page of outliers belongs to a fraction"),
                            (["--outlier-page", "9"], "a cap or a page of outliers belongs to a fraction"),
                            (["--key-bits", "16", "--outliers", "0.1"], "keys: 16 bits have no outliers"),
                            (["--bits", "16", "--gain"], "a correction belongs to")]:
        refused(1, said, *FIT, *arguments, "--out", "x.h5", "act.h5")


def test_output_is_an_input():
    """An output that is an input, by any name, is refused, and the input stays"""
    good(*GOOD[0])
    before = {name: content(name) for name in ("act.h5", "model.h5", "tokens.h5", "q.h5")}
    for name in ("act.h5", "./act.h5", os.path.abspath("act.h5"), "link.h5", "hard.h5"):
        if name == "link.h5":
            os.symlink("act.h5", name)
        if name == "hard.h5":
            os.link("act.h5", name)
        refused(2, "is the input act.h5", *FIT, "--out", name, "act.h5")
        refused(2, "is the input act.h5", *ERROR, "--csv", name, "f16")
    refused(2, "is the input q.h5", *ERROR, "--csv", "q.h5", "f16", "label=q.h5")
    refused(2, "is the input model.h5", *CAPTURE, "model.h5")
    refused(2, "is the input tokens.h5", *CAPTURE, "tokens.h5")
    assert before == {name: content(name) for name in before}


def test_outputs():
    """Outputs that cannot be written: a folder, a missing folder, a device, a name too long; nothing is left behind"""
    os.mkdir("folder")
    before = sorted(os.listdir("."))
    for out in ("folder", "missing/x.h5", "/dev/null", "/dev/full", "/proc/x.h5", "act.h5/x.h5", "a" * 300):
        refused(1, out[:50], *FIT, "--out", out, "act.h5")
        refused(1, out[:50], *CAPTURE, out)
    for out in ("folder", "missing/x.csv", "/dev/full", "/proc/x.csv", "act.h5/x.csv", "a" * 300):
        refused(1, out[:50], *ERROR, "--csv", out, "f16")
    assert before == sorted(os.listdir(".")) and os.listdir("folder") == []


def test_streams():
    """A full pipe or a closed stdout is a failure, said in words; closed streams never get into a file"""
    whole = content("q.h5")
    for arguments in [*GOOD, *([*a, "--json"] for a in GOOD), [*CAPTURE, "c.h5"], *HELPS]:
        for end in (">/dev/full", ">&-", ">&- <&-"):
            run = subprocess.run(["sh", "-c", f'exec "$0" "$@" {end}', LOWKEY, *arguments], capture_output=True, text=True, timeout=60)
            assert run.returncode == 1 and "stdout: cannot write" in run.stderr, (arguments, end, run)
    for end in ("2>&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-"):
        subprocess.run(["sh", "-c", f'exec "$0" "$@" {end}', LOWKEY, *GOOD[0]], capture_output=True, timeout=60)
        assert content("q.h5") == whole, end


def test_places():
    """From another folder, with no environment at all, with a locale of decimal commas: the same bytes"""
    whole = content("q.h5")
    options = [*FIT, "--outliers", "0", "--damp", "0.05"]
    good(*options, "--out", os.path.abspath("r.h5"), os.path.abspath("act.h5"), cwd="/")
    assert content("r.h5") == whole
    good(*options, "--out", "r.h5", "act.h5", env={})
    assert content("r.h5") == whole
    good(*options, "--out", "r.h5", "act.h5", env=dict(LC_ALL="de_DE.UTF-8", LANG="de_DE.UTF-8", LC_NUMERIC="de_DE.UTF-8"))
    assert content("r.h5") == whole


def test_inputs():
    """Folders, devices, pipes, texts and files of another kind are refused in one line by every command that reads"""
    os.mkfifo("pipe")
    with open("text.h5", "w") as file:
        file.write("lowkey\n" * 101)
    for name in ("folder", "/dev/null", "/dev/zero", "pipe", "text.h5", "missing.h5", ""):
        for arguments in ([*FIT, "--out", "x.h5", name], ["inspect", name], ["check", name], [*ERROR, name or "=" + name],
                          ["error", "--activations", name, "f16"], ["eval", "--model", name, "--tokens", "tokens.h5"],
                          ["eval", "--model", "model.h5", "--tokens", name], ["bench", "solve", "--input", name]):
            run = lowkey(*arguments)
            assert run.returncode in (1, 2) and run.stdout == "" and len(run.stderr.splitlines()) == 1, (arguments, run)
    for arguments in ([*FIT, "--out", "x.h5", "q.h5"], [*ERROR, "act.h5"], ["error", "--activations", "q.h5", "f16"],
                      ["eval", "--model", "tokens.h5", "--tokens", "tokens.h5"], ["eval", "--model", "model.h5", "--tokens", "model.h5"]):
        refused(1, "attribute schema: expected", *arguments)


def test_signals():
    """SIGINT and SIGTERM in the middle end a fit with status 1, SIGKILL at once; an older output stays whole"""
    whole = content("q.h5")
    slow = ["bench", "solve", "--points", str(1 << 22), "--repeat", "1000"]
    process = subprocess.Popen([LOWKEY, *slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and out == b"", (process.returncode, out)
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        for delay in (0.005, 0.02, 0.05):
            process = subprocess.Popen([LOWKEY, *GOOD[0]], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            time.sleep(delay)
            process.send_signal(sent)
            _, said = process.communicate(timeout=60)
            assert process.returncode in (0, 1, -sent), (sent, process.returncode, said)
            assert content("q.h5") == whole
    left = [name for name in os.listdir(".") if name.startswith("q.h5") and name != "q.h5"]
    good(*GOOD[0])
    assert content("q.h5") == whole and len(left) <= 3, left  # a killed writer may leave its scratch file


tap.run(globals())
