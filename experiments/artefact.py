"""What the converters share: refusals in one line, files that are whole or not there, interrupts."""
import contextlib
import hashlib
import os
import signal
import sys

import h5py

CREATED_BY = "lowkey 0.1"


class Refused(Exception):
    """What was asked cannot be done; the message is one line that says file, object, expected, found."""


def need(condition, message):
    if not condition:
        raise Refused(message)


_interrupted = []


def go_on():
    """Ends the program's work, tidily, where a signal came in. Raising in the handler itself would not do:
    Python swallows what is raised while it runs a callback of its own."""
    if _interrupted:
        raise KeyboardInterrupt


def note(message):
    print(message, file=sys.stderr)


def progress(what, done, total):
    """A line that rewrites itself, only where somebody watches; and a place to be interrupted."""
    go_on()
    if sys.stderr.isatty():
        text = f"{what} {100 * done // total:3d} %" if done < total else ""
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def whole_file(path, verify):
    """Yield an HDF5 file beside path; when the block ends well, verify(its name) and rename it over path."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with h5py.File(temporary, "w", track_order=False) as file:
            yield file
        verify(temporary)
        go_on()
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def set_schema(file, schema, minor=0):
    file.attrs["schema"] = schema
    file.attrs["schema_version"] = [1, minor]
    file.attrs["created_by"] = CREATED_BY


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def run(main):
    """Run a converter's main as a command: exit 0 good, 1 failed with one line, 130 interrupted."""
    def interrupted(number, _):
        _interrupted.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one kills

    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, interrupted)
    program = os.path.basename(sys.argv[0])
    try:
        main()
    except KeyboardInterrupt:
        _exit(program, "interrupted; nothing was written", 130)
    except Refused as why:
        _exit(program, why, 1)
    except MemoryError:
        _exit(program, "out of memory", 1)
    except OSError as why:
        _exit(program, f"{why.filename or 'i/o'}: {why.strerror or why}", 1)


def _exit(program, why, status):
    print(f"{program}: {' '.join(str(why).split())}", file=sys.stderr)
    sys.exit(status)
