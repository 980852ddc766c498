"""Entry point of ``zkl-debug``: a click group that loads each command only when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

from zkl_debug import __version__
from zkl_debug.errors import ExitCode, ZklError

#: command name -> (module, attribute, one-line help). Only modules that exist are listed.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "demo": ("zkl_debug.cli.demo", "command", "The story in one screen: a bed with its stack on and off."),
    "doctor": ("zkl_debug.cli.doctor", "command", "What this machine can run."),
    "beds": ("zkl_debug.cli.beds", "command", "Beds, their switches and faults."),
    "capture": ("zkl_debug.cli.capture", "command", "Run a bed and capture both sides."),
    "diff": ("zkl_debug.cli.diff", "command", "Compare two captures; name the first operator that differs."),
    "zoom": (
        "zkl_debug.cli.zoom",
        "command",
        "Inside one site: the first tensor operator that differs, with its source.",
    ),
    "bundle": ("zkl_debug.cli.bundle", "command", "One operator of a mismatch as a folder that replays by itself."),
    "inspect": ("zkl_debug.cli.inspect", "command", "Show what a capture folder holds."),
    "repair": ("zkl_debug.cli.repair", "command", "Recover every flushed frame of a capture that was killed."),
    "logprobs": ("zkl_debug.cli.logprobs", "command", "What generation and training log-probs say by themselves."),
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
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and exit with one of :class:`~zkl_debug.errors.ExitCode`.

    Args:
        argv: arguments without the program name; default ``sys.argv[1:]``.
    """
    try:
        code = group.main(args=list(argv) if argv is not None else None, prog_name="zkl-debug", standalone_mode=False)
    except ZklError as error:
        click.echo(f"zkl-debug: {error}", err=True)
        code = error.exit_code
    except click.exceptions.Abort:
        click.echo("zkl-debug: interrupted", err=True)
        code = 130
    except click.ClickException as error:
        error.show()
        code = ExitCode.USAGE
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        code = 0
    sys.exit(int(code or 0))


if __name__ == "__main__":
    main()
