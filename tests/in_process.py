"""Run one of our Python commands in this process: quicker than a new one, and the same to what it reads and writes."""
import contextlib
import io
from unittest import mock

import artefact


def call(module, *arguments):
    """(exit status, stderr)"""
    errors, status = io.StringIO(), 0
    with mock.patch("sys.argv", [f"{module.__name__}.py", *arguments]), contextlib.redirect_stderr(errors), \
            contextlib.redirect_stdout(io.StringIO()):
        try:
            artefact.run(module.main)
        except SystemExit as done:
            status = done.code
    return status, errors.getvalue()
