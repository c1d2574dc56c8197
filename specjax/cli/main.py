"""The entry point: parse, run, and turn an error into one message and exit code 2."""

import dataclasses
import functools
import operator
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro

from specjax import __version__
from specjax.cli import aot, bench, calibrate, convert, demo, doctor, generate, host_memory, plan, profile, train

HELP = """Speculative decoding in JAX and Pallas.

  specjax doctor                                      what this machine offers
  specjax demo                                        plain and n-gram decoding side by side
  specjax generate --drafter ngram "Write a haiku."   text on stdout
  specjax COMMAND --help                              flags and examples of a command
  specjax --version"""

GROUPS = {"train": (train.COMMANDS, train.HELP)}  # commands that have commands

COMMANDS = {
    "generate": (generate.Generate, generate.HELP),
    "demo": (demo.Demo, demo.HELP),
    "bench": (bench.Bench, bench.HELP),
    "calibrate": (calibrate.Calibrate, calibrate.HELP),
    "plan": (plan.PlanCommand, plan.HELP),
    "profile": (profile.Profile, profile.HELP),
    "convert": (convert.Convert, convert.HELP),
    "doctor": (doctor.Doctor, doctor.HELP),
    "aot": (aot.Aot, aot.HELP),
}


@dataclasses.dataclass
class _Group:
    """What stands for a group in the list of commands."""


def parse(argv: Sequence[str]) -> Any:
    """The command of these arguments, ready to `run()`. tyro prints help and usage errors, and exits."""
    if argv and argv[0] in GROUPS:
        commands, text = GROUPS[argv[0]]
        return _parse(argv[1:], commands, f"specjax {argv[0]}", text)
    groups = {name: (_Group, text) for name, (_, text) in GROUPS.items()}
    return _parse(argv, COMMANDS | groups, "specjax", HELP)


def _parse(argv: Sequence[str], commands: Mapping[str, tuple[type, str]], prog: str, text: str) -> Any:
    options = {"config": (tyro.conf.FlagCreatePairsOff,)}
    if argv and argv[0] in commands:
        command, text = commands[argv[0]]
        return tyro.cli(command, prog=f"{prog} {argv[0]}", description=text, args=argv[1:], **options)
    # Nothing that can run: only for the list of commands, and for the message about an unknown one.
    listed = [
        Annotated[command, tyro.conf.subcommand(name, description=text.partition("\n")[0])]
        for name, (command, text) in commands.items()
    ]
    return tyro.cli(functools.reduce(operator.or_, listed), prog=prog, description=text, args=argv, **options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code: 0, 1 (the command's own verdict), 2 (an error) or 130 (interrupted)."""
    if argv is None:  # a process of our own: ended from outside, it leaves no temporary files either
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        host_memory.keep()
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv == ["--version"]:
        print(f"specjax {__version__}")
        return 0
    command = parse(argv)
    try:
        return command.run()
    except BrokenPipeError:
        # The reader of stdout has left; nothing is wrong. Python would complain at exit unless stdout leads somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if command.debug:
            raise
        expected = isinstance(error, ValueError | OSError)
        name = "" if expected else f"{type(error).__name__}: "
        print(f"error: {name}{error}" + ("" if expected else "\n(--debug shows where)"), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
