"""``rlmesh``: runs the subcommand and turns errors into an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from rlmesh.driver.standard_streams import fill_standard_streams
from rlmesh.errors import UsageError
from rlmesh.job.nearest_name import did_you_mean


def split_at_script(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str], list[str]]:
    """Split into the parser's options, the script (one word, or none), and the script's arguments: all words after it,
    except one ``--`` directly after it.

    Raises:
        UsageError: an option before the script is unknown to the parser.
    """
    options = parser._option_string_actions
    rest = list(words)
    own: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        own.append(word)
        name, equals, _ = word.partition("=")
        action = options.get(name)
        if action is None and not word.startswith("--"):
            action = options.get(word[:2])
            equals = word[2:]  # -r3
        if action is None:
            known = [option for option in options if option.startswith("--") == name.startswith("--")]
            raise UsageError(f"unknown option {name}.{did_you_mean(name, known)} Options of the script stand behind it")
        if action.nargs != 0 and not equals and rest:
            own.append(rest.pop(0))
    if rest[:1] == ["--"]:
        rest.pop(0)
    script, rest = rest[:1], rest[1:]
    return own, script, rest[1:] if rest[:1] == ["--"] else rest


COMMANDS = (
    "launch", "ps", "status", "logs", "stacks", "stop", "doctor", "plan", "timeline", "chaos", "prepare", "train",
    "evaluate", "samples", "replay", "export", "env", "keygen", "version",
)  # fmt: skip
"""Subcommands; each has a module. Only the module of the given command is loaded, so that a job starts sooner."""

FOLDERS = dict.fromkeys(("evaluate", "samples", "replay", "export"), "trained")
"""Folders of the modules that are not in ``commands``."""

RUN_SCRIPTS = ("launch", "plan")
"""Subcommands that run a script: words after the script are its arguments."""

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def build_parser(*chosen: str) -> argparse.ArgumentParser:
    """The parser of all subcommands, as ``rlmesh --help`` shows them, or of the ``chosen`` ones."""
    parser = argparse.ArgumentParser(
        prog="rlmesh",
        description="Runs multi-role reinforcement-learning jobs without Ray.",
        epilog="Exit codes: 0 the job succeeded, 1 it failed, 2 wrong usage, 75 it stopped after notice and can be "
        "resumed, 130 stopped by Ctrl-C, 143 by SIGTERM.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in chosen or COMMANDS:
        import_module(f"rlmesh.cli.{FOLDERS.get(name, 'commands')}.{name}").add_to(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; wrong usage raises ``SystemExit(2)``, as argparse does."""
    fill_standard_streams()
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # while the command's module is imported; `as_command` has it of a running command
        print("rlmesh: stopped", file=sys.stderr)
        return INTERRUPTED


def _run(words: list[str]) -> int:
    if words[:1] == ["launch"]:
        from rlmesh.cli.commands import launch
        from rlmesh.cli.launching import slurm

        if slurm.FLAG in words:
            parser = argparse.ArgumentParser(prog="rlmesh launch --slurm", allow_abbrev=False)
            launch.add_options(parser)
            if slurm.asks_for_sbatch(words[1:], parser):
                return slurm.submit_words(words[1:], parser)
    parser = build_parser(*(word for word in words[:1] if word in COMMANDS))
    if words and words[0] in RUN_SCRIPTS:
        own, rest = _split(words, parser)
    else:
        own, _, rest = split_at_dashes(words)
    parsed = parser.parse_args(own)
    code: int = parsed.run(parsed, rest)
    return code


def _split(words: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Split into the words of the command, including the script's name, and the script's arguments."""
    command, *rest = words
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    chosen: argparse.ArgumentParser = commands.choices[command]
    try:
        own, script, arguments = split_at_script(rest, chosen)
    except UsageError as error:
        chosen.error(str(error))
    return [command, *own, *script], arguments


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Words before the first ``--``, True if there is one, and the words after it."""
    if "--" not in words:
        return list(words), False, []
    at = words.index("--")
    return list(words[:at]), True, list(words[at + 1 :])


if __name__ == "__main__":
    sys.exit(main())
