"""The `hybridge` command: its verbs, and how an error reaches the person who typed it.

A verb lives in one file of `hybridge.commands` and imports the rooms it needs only when it is
called, so that `hybridge --help` and `hybridge run` never load torch.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

import click

from hybridge import __version__
from hybridge.artifacts.errors import HybridgeError
from hybridge.commands.checkpoint import checkpoint
from hybridge.commands.compile import compile_command
from hybridge.commands.device_check import device_check
from hybridge.commands.inspect import inspect_command
from hybridge.commands.run import run
from hybridge.commands.verify import verify

EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# Package -> the extra that brings it, for a verb called in an environment that lacks it.
EXTRA_OF = {
    "ml_dtypes": "compile",
    "onnx": "compile",
    "onnx_ir": "compile",
    "onnxscript": "compile",
    "safetensors": "compile",
    "torch": "compile",
    "tokenizers": "text",
    "torch_npu": "ascend",
}

EXIT_CODES = """
\b
Exit codes:
  0    done
  1    an internal error (rerun with --debug and report it)
  2    the command was used wrongly
  3    the config or checkpoint cannot be used
  4    a trace, a pass or a lowering failed
  5    the artifact is damaged or of another version
  6    the runner could not serve the request
  7    verified values differ by more than the tolerance
  8    this machine lacks the device, or the software for it, that a check needs
  130  interrupted (Ctrl-C)
"""


@click.group(epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hybridge")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Compile hybrid LLMs (KDA + DSA + Attention Residuals + latent MoE) ahead of time.

    \b
    The way of a model:
      hybridge checkpoint new --preset kimi-k3.1-tiny ckpt   a random one, to try things on
      hybridge compile ckpt -o art                           trace, fuse, emit graphs
      hybridge inspect art                                   what fused, and what did not and why
      hybridge run art --ids 1,2,3                           prompt in, tokens out (needs no torch)
      hybridge verify art                                    numbers against the stored, and eager
      hybridge device-check art                              an Ascend artifact on its NPU

    `hybridge VERB --help` has more examples. Results go to stdout, progress to stderr.
    """
    context.obj = {"debug": debug}


for command in (compile_command, inspect_command, run, verify, device_check, checkpoint):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code instead of leaving the process.

    Args:
        arguments: the words after `hybridge`; None takes them from sys.argv.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    warnings.showwarning = _show_warning
    try:
        result = cli.main(args=list(arguments), prog_name="hybridge", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (`| head`) is gone: no error, and no second one at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _report(error, debug=_wants_debug(arguments))


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line, without the place in our source that Python would add."""
    print(f"warning: {message}", file=sys.stderr)


def _wants_debug(arguments: Sequence[str]) -> bool:
    return "--debug" in arguments or os.environ.get("HYBRIDGE_DEBUG", "0") not in {"", "0"}


def _report(error: Exception, *, debug: bool) -> int:
    """Show one clear message on stderr; return the exit code that the error stands for."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, HybridgeError):
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, ModuleNotFoundError) and (extra := _extra_for(error)):
        print(
            f"error: this needs the package {error.name!r}, which is not installed\n"
            f"  remedy: pip install 'hybridge[{extra}]'",
            file=sys.stderr,
        )
        return EXIT_USAGE
    print(
        f"internal error: {type(error).__name__}: {error}\n"
        "  remedy: run it again with --debug and report what it shows",
        file=sys.stderr,
    )
    return EXIT_INTERNAL


def _extra_for(error: ModuleNotFoundError) -> str | None:
    return EXTRA_OF.get((error.name or "").split(".")[0])


if __name__ == "__main__":
    sys.exit(main())
