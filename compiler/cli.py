"""The command line: a table of commands, loaded when chosen, and the one place where errors become text and exit codes.

Exit codes: 0 done, 1 failed while running, 2 the input is wrong, 3 no plan fits, 130 interrupted. Machine output
(`--json`) goes to stdout, everything for people to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click
from titan.grammar.diagnostics import Diagnostic, TitanError

INTERRUPTED = 130  # exit code

# command -> (module:function, one line); nothing is imported before it is chosen
COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("titan.compiler.commands.check:check", "Read a spec and report everything that is wrong with it."),
    "plan": ("titan.compiler.commands.plan:plan", "Search, compile, prove and price; print the plan's summary."),
    "explain": ("titan.compiler.commands.explain:explain", "Why a plan is as it is, or what a code means."),
    "inspect": ("titan.compiler.commands.inspect:inspect", "Show a plan, or the instructions of any one rank."),
    "verify": ("titan.compiler.commands.verify:verify", "Prove a plan; with --execute also run a small one."),
    "diff": ("titan.compiler.commands.diff:diff", "What differs between two plans."),
    "run": ("titan.compiler.commands.run:run", "Train; starts local ranks or joins a torchrun or SLURM world."),
    "profile": ("titan.compiler.commands.profile:profile", "Measure this machine; write it as a cluster to import."),
    "data": ("titan.compiler.commands.data:data", "Token files from text files."),
    "export": ("titan.compiler.commands.exchange:export", "Write what other tools read: a pipeline's order."),
    "import": ("titan.compiler.commands.exchange:import_", "Read what other tools write: a pipeline's order."),
    "fmt": ("titan.compiler.commands.fmt:fmt", "Format spec files."),
    "mfu": ("titan.compiler.commands.mfu:mfu", "FLOPs utilisation of a measured speed, by both rules."),
    "doctor": ("titan.compiler.commands.doctor:doctor", "Check that this machine has what Titan needs."),
    "passes": ("titan.compiler.commands.passes:passes", "List the passes, or show what one of them changes."),
}


class Table(click.Group):
    """A group whose commands are named in COMMANDS and imported only when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = COMMANDS.get(cmd_name)
        if found is None:
            return None
        module, _, function = found[0].partition(":")
        command = getattr(import_module(module), function)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise TitanError(_unknown_command(args[0]))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Pipes to processes of ours may break too: a failure, which click would take for a reader that has left."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            if _reader_is_gone():
                raise
            raise RuntimeError("a process that this one had started is gone") from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


def _unknown_command(name: str) -> Diagnostic:
    from titan.grammar.suggestions import nearest_names

    return Diagnostic("T601", f"there is no command `{name}`", nearest=nearest_names(name, COMMANDS, 2))


def _version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"titan {version('titan-compiler')}")
        ctx.exit()


@click.group(
    cls=Table,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Begin with `titan run examples/quickstart.titan`. `titan COMMAND --help` shows an example of each.",
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Print the version."
)
def titan() -> None:
    """A compiler for pre-training large models: spec -> plan -> proof, price and training."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console command `titan`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    short = arguments is None and given[:1] != ["run"]
    if short:  # a plan is a large tree without cycles
        gc.disable()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # it would look through all that is installed
    code = run(given)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _close_stdout()
    # Taking modules down in order takes long, torch above all, and nothing is left to do. After an interrupt inside of
    # `exec`, `python -m` would end itself by the signal in place of the code.
    if short or "torch" in sys.modules or code == INTERRUPTED:
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs one command and gives its exit code; every error ends here."""
    try:
        result = titan.main(arguments, prog_name="titan", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except TitanError as error:
        _report(error, "--json" in arguments)
        return error.exit_code
    except click.ClickException as error:
        _report(TitanError(_usage(error)), "--json" in arguments)
        return 2
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):  # click turns the one into the other
        _close_stdout()
        return 0
    except Exception as error:
        if os.environ.get("TITAN_DEBUG") == "1":
            raise
        _report_internal(error, arguments)
        return 1


def _usage(error: click.ClickException) -> Diagnostic:
    context = getattr(error, "ctx", None)
    label = f"usage: {context.command.get_usage(context).removeprefix('Usage: ')}" if context else ""
    return Diagnostic("T601", error.format_message().rstrip("."), label=label)


def _report(error: TitanError, as_json: bool) -> None:
    from titan.grammar.diagnostics import render_all

    print(render_all(error), file=sys.stderr)
    if as_json:
        from titan.compiler.commands.output import diagnostics_json

        print(json.dumps({"ok": False, "diagnostics": diagnostics_json(error.diagnostics)}))


def _reader_is_gone() -> bool:
    """Whether nobody reads what is printed any more."""
    from select import poll

    watched = poll()
    for stream in (1, 2):
        watched.register(stream, 0)  # errors alone
    return bool(watched.poll(0))


def _report_internal(error: Exception, arguments: list[str]) -> None:
    """One line for the user; the traceback goes to a file that only they can read."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="titan-report-", suffix=".txt", delete=False) as file:
        file.write(f"titan {' '.join(arguments)}\nPython {sys.version}\n\n")
        file.write("".join(traceback.format_exception(error)))
    what = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    print(f"error T600: internal error: {what} (report: {file.name})", file=sys.stderr)


def _close_stdout() -> None:
    """The reader has gone: nothing more can be written there, not even when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
