"""The command line as a whole: help, version, and how errors reach the person who typed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hybridge
from hybridge import cli
from hybridge.artifacts import errors

VERBS = ["compile", "inspect", "run", "verify", "checkpoint", "checkpoint new"]


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `hybridge inspect x` raise an error."""

    def raise_it(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(cli.cli.commands["inspect"], "callback", raise_it)


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_shows_what_it_does_with_examples(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*verb.split(), "--help"]) == 0
    output = capsys.readouterr().out
    assert "Usage: hybridge" in output
    assert "hybridge compile" in output or "Examples:" in output or verb == "checkpoint"


def test_help_documents_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--help"])
    listed = capsys.readouterr().out.split("Exit codes:")[1].split()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, errors.HybridgeError)}
    assert {str(code) for code in codes | {0, 130}} <= set(listed)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hybridge, version {hybridge.__version__}\n"


@pytest.mark.parametrize(
    "kind",
    [
        errors.UsageError,
        errors.CheckpointError,
        errors.CompileError,
        errors.ArtifactError,
        errors.RunError,
        errors.VerifyError,
    ],
)
def test_an_error_is_one_message_with_its_remedy_and_code(
    kind: type[errors.HybridgeError],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail_with(monkeypatch, kind("layer 3 has no key", "give it one"))
    assert cli.main(["inspect", "x"]) == kind.exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: layer 3 has no key\n  remedy: give it one\n"


@pytest.mark.parametrize("arguments", [["--debug", "inspect", "x"], ["inspect", "x", "--debug"]])
def test_debug_shows_the_traceback(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, errors.CompileError("no", "yes"))
    assert cli.main(arguments) == 4
    captured = capsys.readouterr().err
    assert "Traceback" in captured
    assert captured.endswith("error: no\n  remedy: yes\n")


def test_an_unforeseen_error_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, ZeroDivisionError("division by zero"))
    assert cli.main(["inspect", "x"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("internal error: ZeroDivisionError: division by zero\n")
    assert "--debug" in message
    assert "Traceback" not in message


def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, ModuleNotFoundError("No module named 'torch'", name="torch.fx"))
    assert cli.main(["inspect", "x"]) == 2
    assert "pip install 'hybridge[compile]'" in capsys.readouterr().err


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert cli.main(["inspect", "x"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


@pytest.mark.parametrize(
    "arguments", [["no-such-verb"], ["compile"], ["compile", "x"], ["inspect", "x", "--no-such"]]
)
def test_wrong_usage_is_code_2_on_stderr(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: hybridge" in captured.err


def test_an_artifact_that_is_none_is_code_5(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "no/such/folder"]) == 5
    assert "no/such/folder" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -P -m hybridge.cli --help | head -n 1"
    process = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0
    assert process.stderr == ""


def test_help_is_quick_and_loads_no_torch() -> None:
    code = (
        "import sys; from hybridge.cli import main; main(['--help']);"
        "print({'torch', 'numpy', 'onnxruntime'} & set(sys.modules), file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stderr.strip() == "set()"
