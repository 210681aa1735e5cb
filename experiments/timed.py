"""Run a command, and note what it took.

    timed.py LOG.csv COMMIT NAME COMMAND...

A row is added to LOG.csv when the command has succeeded: wall and CPU seconds, peak resident memory, and the command itself.
Its exit status is handed on."""
import csv
import os
import shlex
import signal
import subprocess
import sys
import time

HEADER = "name,seconds,cpu_seconds,peak_mib,commit,command".split(",")


def main(log, commit, name, *command):
    start = time.monotonic()
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the command's to answer
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        return max(os.waitstatus_to_exitcode(status), 1)
    with open(log, "a", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            rows.writerow(HEADER)
        rows.writerow([name, f"{time.monotonic() - start:.1f}", f"{usage.ru_utime + usage.ru_stime:.1f}",
                       f"{usage.ru_maxrss / 1024:.0f}", commit, shlex.join(command)])
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
