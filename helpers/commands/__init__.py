"""The command line, `python -m helpers`: a module for each command, and what they have in common.

A command returns its exit code: 0, or 1 where the answer is no (a wrong kernel, findings, no GPU). An error is a sentence on
stderr; it gives 1, or 2 where the command line is at fault (an unknown kernel, a shape that a kernel doesn't take).
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from . import bench, book, check, course, doctor, exercise, goals, grade, notebooks, readme, record, run, xray
from .arguments import command

COMMANDS = (doctor, check, xray, run, bench, exercise, grade, record, goals, readme, notebooks, book, course)
ABOUT = "FlashAttention, one kernel at a time: check, X-ray, run and time CUDA kernels, with a GPU or without."
NOTES = """\
KERNEL is a rung of the ladder by its stem or a part of it, like 04, fa2_fp32 or ping_pong, or the path of any .cu file that
defines fa_launch.
`python -m helpers COMMAND --help` has the options of a command and examples.

exit codes: 0 all is well; 1 the answer is no (a wrong kernel, findings, no GPU); 2 the command line is wrong
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line, by default that of this process, and returns its exit code. argparse's own refusals exit with 2."""
    arguments = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr, flush=True)
            code = arguments.do(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as error:
        print(str(error) or "stopped", file=sys.stderr)
        return 130  # as a shell reports SIGINT
    except BrokenPipeError:  # whoever reads the pipe, as in `… | head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, LookupError, OSError, RuntimeError, AssertionError) as error:
        if arguments.traceback:
            raise
        print(_sentence(error), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m helpers", description=ABOUT, epilog=NOTES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        module.options(command(commands, name, module.__doc__, getattr(module, "run", None), module.EXAMPLES))
    return parser


def _sentence(error: Exception) -> str:
    """An exception's text; a KeyError's without the quotes that Python puts around it."""
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error) or type(error).__name__
