"""Entry point of ``zkl-debug``: a click group that loads each command only when it is called."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shlex
import sys
from collections.abc import Sequence

import click

from zkl_debug import __version__
from zkl_debug.errors import Ended, ExitCode, ZklError

#: command name -> (module, attribute, one-line help). Only modules that exist are listed.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "demo": ("zkl_debug.cli.demo", "command", "The story in one screen: a bed with its stack on and off."),
    "doctor": ("zkl_debug.cli.doctor", "command", "What this machine can run."),
    "beds": ("zkl_debug.cli.beds", "command", "Beds, their switches and faults."),
    "capture": ("zkl_debug.cli.capture", "command", "Run a bed and capture both sides."),
    "env": ("zkl_debug.cli.env", "command", "Variables that capture a program which no command starts."),
    "diff": ("zkl_debug.cli.diff", "command", "Compare two captures; name the first operator that differs."),
    "zoom": (
        "zkl_debug.cli.zoom",
        "command",
        "Inside one site: the first tensor operator that differs, with its source.",
    ),
    "bundle": ("zkl_debug.cli.bundle", "command", "One operator of a mismatch as a folder that replays by itself."),
    "names": ("zkl_debug.cli.names", "command", "Which site of one capture is which of another, across model trees."),
    "inspect": ("zkl_debug.cli.inspect", "command", "Show what a capture folder holds."),
    "repair": ("zkl_debug.cli.repair", "command", "Recover every flushed frame of a capture that was killed."),
    "logprobs": ("zkl_debug.cli.logprobs", "command", "What generation and training log-probs say by themselves."),
    "ingest": ("zkl_debug.cli.ingest", "command", "Other tools' dumps as a capture or a table of log-probs."),
    "check": (
        "zkl_debug.cli.check",
        "command",
        "Check a NeMo-RL recipe for what zero train/generation mismatch requires.",
    ),
    "bisect": ("zkl_debug.cli.bisect", "group", "Which switch makes it go away, which commit brought it."),
    "watch": ("zkl_debug.cli.watch", "command", "A loop under a light monitor that stops where it diverges."),
    "certify": ("zkl_debug.cli.certify", "command", "The gate: zero over every edge, or the cause and the edges left."),
    "stack": ("zkl_debug.cli.stack", "command", "The ladder of switches: what can be tried where, and the plan."),
    "bench": ("zkl_debug.cli.bench", "command", "Measured costs, and the scoreboard over known faults."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported on first use, so that ``diff`` never pays for torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        from zkl_debug.cli.examples import with_examples

        command: click.Command = getattr(importlib.import_module(module), attribute)
        return with_examples(command, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        return super().resolve_command(ctx, args)


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zkl-debug")
def group() -> None:
    """Find the first layer and operator where training and generation stop being bitwise equal."""


def _documents() -> int:
    """JSON documents printed so far. The module that prints them loads rich: a command that needs it has loaded it."""
    return int(getattr(sys.modules.get("zkl_debug.cli.common"), "documents", 0))


def _error_json(arguments: Sequence[str], before: int, found: str, expected: str, next_step: str, code: int) -> None:
    """With ``--json`` there is one document on stdout even where a command could not do its work."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" not in own or _documents() > before:
        return
    document = {"format": "zkl-error", "version": 1, "found": found, "expected": expected}
    document |= {"next": [next_step] if next_step else [], "exit_code": code}
    with contextlib.suppress(OSError):
        click.echo(json.dumps(document, indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and exit with one of :class:`~zkl_debug.errors.ExitCode`.

    Args:
        argv: arguments without the program name; default ``sys.argv[1:]``.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer in another encoding beats none
    before = _documents()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = group.main(args=arguments, prog_name="zkl-debug", standalone_mode=False)
    except ZklError as error:
        following = error.next_step or _help_of(arguments)
        told = str(error) if error.next_step else f"{error}\nnext: {following}"
        click.echo(f"zkl-debug: {told}", err=True)
        code = error.exit_code
        _error_json(arguments, before, error.found, error.expected, following, int(code))
    except (click.exceptions.Abort, Ended) as stop:
        again = shlex.join(["zkl-debug", *arguments])
        found, code = (f"ended by {stop.name}", stop.code) if isinstance(stop, Ended) else ("interrupted", 130)
        click.echo(f"zkl-debug: {found}\nnext: {again}", err=True)
        _error_json(arguments, before, found, "a run to the end", again, int(code or 0))
    except click.ClickException as error:
        error.show()
        code = ExitCode.USAGE
        _error_json(arguments, before, error.format_message(), "", "", int(code))
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except OSError as error:
        code = _output_failed(error)
    sys.exit(_flushed(int(code or 0)))


def _help_of(arguments: Sequence[str]) -> str:
    """The help of the command that was called, which ends with examples."""
    words = [word for word in arguments[:2] if not word.startswith("-")]
    command = [words[0]] if words and words[0] in COMMANDS else []
    if command and command[0] in ("bisect", "bench"):
        command += words[1:2]
    return " ".join(["zkl-debug", *command, "--help"])


#: Exit status where nobody read the output to its end, as a shell gives it for SIGPIPE; never that of a verdict.
_PIPE_CLOSED = 141


def _output_failed(error: OSError) -> int:
    """Exit code after writing failed; says why on stderr unless the reader simply went away."""
    if isinstance(error, BrokenPipeError):
        code = _PIPE_CLOSED
    else:
        name = f" {error.filename}" if error.filename else ""
        click.echo(f"zkl-debug: reading or writing{name} failed: {error.strerror or error}", err=True)
        code = int(ExitCode.USAGE)
    with contextlib.suppress(OSError):  # what is left in the buffer must not fail again when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _flushed(code: int) -> int:
    """The exit code, once everything is really written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _output_failed(error)
    return code


if __name__ == "__main__":
    main()
