"""Entry point of ``nvep``: finds the command and runs it.

A command is a module with ``add_arguments(parser)`` and ``run(namespace) -> int``. Only the module of the command that
was asked for is imported.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import nvep
from nvep.errors import NvepError

COMMANDS = {
    "demo": ("nvep.cli.demo", "generate text with a mixture-of-experts model over several ranks and check it"),
    "replay": ("nvep.cli.replay", "send a recorded router log through an exchange and check every row"),
    "info": ("nvep.cli.info", "show devices, links, MPI, compilers, versions, and the heap of a configuration"),
    "bench": ("nvep.cli.bench", "time dispatch and combine over many cases, beside the floors of this machine"),
    "trace": ("nvep.cli.trace", "record when every phase of overlapped steps ran, as a Chrome or Perfetto trace"),
    "plot": ("nvep.cli.plot", "draw curves of latency and bandwidth from what nvep bench wrote"),
    "tune": ("nvep.cli.tune", "measure which protocol and how many blocks are fastest on this machine, by size"),
    "simulate": ("nvep.cli.simulate", "run exchanges under a weak memory model from seeds, or find planted bugs"),
    "decode-ring": ("nvep.cli.decode_ring", "print send queues and descriptor rings, from a file or a running process"),
    "compile": ("nvep.cli.compile", "compile every kernel for GPU architectures; needs no GPU"),
}
ERROR_STATUS = 2
INTERRUPTED_STATUS = 130  # what a shell shows for a program ended by Ctrl-C


def _parser(asked: str | None) -> argparse.ArgumentParser:
    """Parser with the options of command ``asked`` and the names of the others."""
    parser = argparse.ArgumentParser(prog="nvep", description=nvep.__doc__)
    parser.add_argument("--version", action="version", version=f"nvep {nvep.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == asked:
            _module(name).add_arguments(command)
    return parser


def _module(command: str) -> Any:
    return import_module(COMMANDS[command][0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``nvep`` with ``argv`` (default: the process's arguments) and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        namespace = _parser(asked).parse_args(arguments)
        status = int(_module(namespace.command).run(namespace))
        if sys.stdout is not None:  # a process may be started with it closed
            sys.stdout.flush()
        return status
    except NvepError as error:
        print(f"nvep: error: {error}", file=sys.stderr)
        return ERROR_STATUS
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except BrokenPipeError:  # `nvep info | head`: the reader has seen enough
        _discard_output()
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        print(f"nvep: error: {error.strerror}", file=sys.stderr)
        return ERROR_STATUS


def _discard_output() -> None:
    """What is still buffered cannot be written: Python would try again, and complain, at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
