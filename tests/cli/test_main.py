"""Help, usage errors, and errors of commands: one message, exit code 2."""

import dataclasses
import inspect
import signal
import subprocess
import sys

import pytest

from specjax import __version__
from specjax.cli import flags, host_memory
from specjax.cli.main import COMMANDS, main
from specjax.config import ConfigError
from specjax.engine.engine import Engine
from specjax.sampling import SamplingParams


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert all(f"• {name}" in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_shows_an_example(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert f"  specjax {name}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["nope"], ["generate", "hi", "--nope"], ["generate", "hi", "--max-tokens", "x"]])
def test_usage_errors(argv, capsys):
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert "Unsupported type annotation" not in captured.err
    if argv == ["nope"]:
        assert "generate, demo, bench" in captured.err and "train" in captured.err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"specjax {__version__}\n"


def test_memory_is_kept_in_a_process_of_its_own_alone(monkeypatch, capsys):
    """A caller's process keeps its own ways."""
    kept = []
    monkeypatch.setattr(host_memory, "keep", lambda: kept.append("keep"))
    monkeypatch.setattr(signal, "signal", lambda *args: kept.append("signal"))
    monkeypatch.setattr(sys, "argv", ["specjax", "--version"])
    assert main(["--version"]) == 0 and not kept
    assert main() == 0 and sorted(kept) == ["keep", "signal"]
    assert capsys.readouterr().out.count(__version__) == 2


def test_help_needs_no_jax():
    code = "import sys, specjax.cli.main; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("no such thing"), "error: no such thing\n"),
        (RuntimeError("broken"), "error: RuntimeError: broken\n(--debug shows where)\n"),
    ],
)
def test_errors_are_one_message(error, shown, capsys, monkeypatch):
    def fail(run, *, quiet, check):
        raise error

    monkeypatch.setattr(flags, "load_engine", fail)
    assert main(["generate", "hi"]) == 2
    assert capsys.readouterr() == ("", shown)
    with pytest.raises(type(error)):
        main(["generate", "hi", "--debug"])


def test_interrupt(monkeypatch):
    def interrupt(run, *, quiet, check):
        raise KeyboardInterrupt

    monkeypatch.setattr(flags, "load_engine", interrupt)
    assert main(["generate", "hi"]) == 130


def test_sampling_flags_are_the_sampling_parameters():
    """Every parameter has its flag, with the same default."""
    assert {f.name for f in dataclasses.fields(flags.SamplingFlags)} == {
        f.name for f in dataclasses.fields(SamplingParams)
    }
    assert flags.SamplingFlags().params() == SamplingParams()


def test_sampling_flags_pass_values():
    params = flags.SamplingFlags(max_tokens=3, top_p=0.5, stop=("a", "b"), logit_bias='{"4": -1.5}').params()
    assert params == SamplingParams(max_tokens=3, top_p=0.5, stop=("a", "b"), logit_bias={4: -1.5})
    with pytest.raises(ValueError, match="--logit-bias is not JSON"):
        flags.SamplingFlags(logit_bias="{").params()
    with pytest.raises(ValueError, match="must be a JSON object"):
        flags.SamplingFlags(logit_bias="[1]").params()


def test_file_yields_to_flags_and_flags_to_set(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("batch: 2\ncontext: 512\ndrafter: suffix\n")
    given = flags.DrafterFlags(config=str(path), batch=3, drafter="ngram", overrides=("context=1024",))
    run = given.run_config(given.named_drafter())
    assert (run.batch, run.context, run.drafter.kind) == (3, 1024, "ngram")


def test_one_name_for_the_drafter():
    given = flags.DrafterFlags(speculative_config='{"method": "ngram", "num_speculative_tokens": 3}')
    assert given.run_config(given.named_drafter()).drafter.num_speculative_tokens == 3
    with pytest.raises(ValueError, match="both name a drafter"):
        flags.DrafterFlags(drafter="ngram", speculative_config="{}").named_drafter()
    with pytest.raises(ConfigError, match="did you mean 'ngram'"):
        flags.EngineFlags().run_config("ngrm")


@pytest.mark.parametrize("method", ["generate", "results", "stream", "with_drafter", "describe", "reset"])
def test_the_fake_engine_has_the_real_ones_signatures(method, engines):
    fake = type(flags.load_engine(None, quiet=True))
    assert list(inspect.signature(getattr(fake, method)).parameters) == list(
        inspect.signature(getattr(Engine, method)).parameters
    )
