"""The commands, with their exit status, and one line for an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click
from click.shell_completion import get_completion_class

from fmapper import __version__
from fmapper.cli.checkpoints import checkpoint
from fmapper.cli.convert import convert
from fmapper.cli.devices import devices
from fmapper.cli.profile import profile
from fmapper.cli.transfer import transfer
from fmapper.cli.translate import translate
from fmapper.cli.verify import NOT_COMPARED, verify
from fmapper.errors import FmapperError
from fmapper.switches import settings

NAME = "fmapper"
FAILED = 1  # the status after an error, unless the command uses 1 for a result
_FAILED_OF = {"verify": NOT_COMPARED}
INTERRUPTED = 130  # 128 + SIGINT, as in shells
_DEBUG = "--debug"


@click.group(
    name=NAME,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option(
    _DEBUG, is_flag=True, help="Show the traceback of an error; accepted at any position."
)
def command(debug: bool) -> None:
    """Any model on any device and in any framework.

    Exit status: 0 done, 1 failed or the outputs differ, 2 wrong usage, 130 interrupted.
    """


EXAMPLES = """
\b
Examples:
  eval "$(fmapper completion bash)"        # in ~/.bashrc; likewise zsh
  fmapper completion fish | source
"""


@click.command(epilog=EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    cls = get_completion_class(shell)
    assert cls is not None
    click.echo(cls(command, {}, NAME, f"_{NAME.upper()}_COMPLETE").source())


for _command in (convert, transfer, translate, verify, checkpoint, profile, devices, completion):
    command.add_command(_command)


def _names(words: Sequence[str]) -> list[str]:
    """Returns the names of the command in the words of a command line, outermost first."""
    names: list[str] = []
    group: click.Command | None = command
    for word in words:
        if not isinstance(group, click.Group):
            break
        if word in group.commands:
            names.append(word)
            group = group.commands[word]
    return names


def _say(error: Exception) -> str:
    """Returns the message of an error; that of a system error begins with the file."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror[:1].lower()}{error.strerror[1:]}"
    return str(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    An error is one line on stderr; with `--debug`, it is raised.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = _DEBUG in given
    settings.full_tracebacks = settings.full_tracebacks or debug
    given = [word for word in given if word != _DEBUG]
    names = _names(given)
    title = " ".join([NAME, *names])
    try:
        return int(command.main(given, prog_name=NAME, standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print(f"{title}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if debug:
            raise
        is_expected = isinstance(error, FmapperError | OSError | ValueError)
        what = (
            _say(error)
            if is_expected
            else f"{type(error).__name__}: {error} ({_DEBUG} shows where)"
        )
        print(f"{title}: {what}", file=sys.stderr)
        return _FAILED_OF.get(names[0] if names else "", FAILED)
