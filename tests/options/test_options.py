"""Every option is defined once: types, commands, Python and docs follow from its field."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import fedgrove as fg
from fedgrove import api
from fedgrove.cli import main
from fedgrove.cli.parameters import add_command
from fedgrove.config.experiment import Experiment
from fedgrove.config.toml import from_toml, to_toml
from fedgrove.errors import InputError, spell_option
from fedgrove.methods import FedAvg
from fedgrove.options import RunOptions, SweepOptions
from fedgrove.options.definition import (
    Field,
    Option,
    Options,
    make_options,
    option,
    option_class,
    options_of,
    takes,
)

ROOT = Path(__file__).parents[2]

PROGRAM = """
import fedgrove as fg
reveal_type(fg.run)
reveal_type(fg.run(method="fedavg"))
reveal_type(fg.run(seed=3))
fg.run("fedavg", rounds=3, set={"mu": 0.1}, finetune=(0, 3))
fg.rerun("runs/a", seed=3)
fg.sweep(["fedavg"], seeds=2)
fg.run("fedavg", rounds="three")
fg.run("fedavg", roundz=3)
fg.sweep(seeds=2)
"""


def test_a_type_checker_sees_every_argument(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache"), str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = done.stdout.replace(str(file), "program.py")
    revealed, one, four = said.splitlines()[:3]
    errors = [line for line in said.splitlines() if " error: " in line]
    assert "data: Any =, net: str | torch.nn.modules.module.Module | None =, *, " in revealed
    assert "rounds: int | None =" in revealed
    assert one.endswith('"fedgrove.runs.result.Result"')
    # Without a method, four are compared.
    assert four.endswith('"fedgrove.config.sweep.Sweep"')
    wrong = dict.fromkeys(line.split(":")[1] for line in errors)
    assert list(wrong) == ["9", "10", "11"]
    assert 'No overload variant of "__call__" of "RunFunction" matches' in errors[0]
    assert any('did you mean "rounds"?' in line for line in errors)
    assert 'Missing positional argument "methods"' in errors[-1]


def test_an_option_is_one_field(capsys: pytest.CaptureFixture[str]) -> None:
    """From one field follow a flag, its help, its check, and an argument in Python."""

    @option_class
    class Extended(RunOptions):
        patience: int | None = option(
            None, "Rounds to wait.", "N", allowed="1 or more", check=lambda n: n >= 1
        )

    seen = []
    app = typer.Typer(rich_markup_mode=None)
    app.callback()(lambda: None)
    add_command(app, "run", Extended, seen.append)
    command = typer.main.get_command(app)

    def type_line(*words: str) -> None:
        command.main(list(words), standalone_mode=False)

    type_line("run", "fedavg", "--patience", "3")
    type_line("run", "--patience", "0")
    assert seen[0].given == {"method": "fedavg", "patience": 3}
    assert seen[1].mistakes == ("patience is 0; it must be 1 or more.",)
    type_line("run", "--help")
    assert re.search(r"--patience +N\b", capsys.readouterr().out)

    @takes(Extended)
    def run(options: Extended) -> int | None:
        """Run."""
        return options.patience

    assert run(patience=5) == 5
    assert "patience: Rounds to wait." in (run.__doc__ or "")
    assert "patience" in inspect.signature(run).parameters


def test_experiments_and_config_toml_have_the_options_of_runs() -> None:
    of_runs = options_of(RunOptions)
    for name, field in options_of(Experiment).items():
        assert of_runs[name] == field
    experiment = Experiment(FedAvg(), seed=3, score_on=7, deadline=2.5)
    assert from_toml(to_toml(experiment)) == experiment


def test_unknown_arguments_name_the_nearest() -> None:
    sentence = (
        r"^run\(\) got an unexpected keyword argument 'round'; did you mean 'rounds'\? "
        r"help\(fedgrove\.run\) lists all arguments\.$"
    )
    # Python's own error for it, and one of fedgrove's.
    with pytest.raises(TypeError, match=sentence) as caught:
        fg.run(round=2)  # type: ignore[call-arg]
    assert isinstance(caught.value, InputError)
    with pytest.raises(TypeError, match=r"help\(fedgrove\.api\.train\) lists all"):
        api.train(Experiment(FedAvg()), rounds=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^run\(\) got multiple values for argument 'data'\.$"):
        fg.run("fedavg", "digits", data="motion")  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"^run takes method, data, net by position, and got 4"):
        fg.run("fedavg", "digits", None, 3)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"^sweep needs methods: a method, as NAME or"):
        fg.sweep()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^resume needs path: "):
        fg.resume()  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"^path is None; it must be text or a path\.$"):
        fg.resume(None)  # type: ignore[arg-type]


def test_names_are_spelled_as_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"^score_on is -1; it must be 0 or more\.$"):
        fg.run("fedavg", score_on=-1)
    assert main(["run", "fedavg", "--score-on", "-1"]) == 2
    sentence = "fedgrove: --score-on is -1; it must be 0 or more.\n"
    assert capsys.readouterr().err == sentence


def test_python_spells_options_its_own_way_after_a_command() -> None:
    seen = []

    @option_class
    class NoOptions(Options):
        """No options."""

    def fail(options: NoOptions) -> None:
        seen.append(spell_option("out", "DIR"))
        raise InputError("seed is 1, and fails.")

    app = typer.Typer()
    app.callback()(lambda: None)
    add_command(app, "fail", NoOptions, fail)
    with pytest.raises(InputError):
        app(["fail"], standalone_mode=False)
    assert main(["run", "fedavg", "--rounds", "0"]) == 2
    assert seen == ["--out DIR"]
    assert spell_option("out", "DIR") == "out=DIR"


def test_what_was_given_is_known() -> None:
    options = make_options(RunOptions, {"seed": 0, "rounds": "x", "finetune": [0, 3]}, "run")
    # Also where the value is the default; what is wrong is not among them.
    assert options.given == {"seed": 0, "finetune": (0, 3)}
    assert options.rounds is None
    assert options.mistakes == ("rounds is 'x'; it must be a whole number.",)
    assert RunOptions().given == {}


@pytest.mark.parametrize(
    ("text", "seeds"), [("3", 3), ("3,5,7", (3, 5, 7)), ("4,", (4,)), ("0", None), ("x", None)]
)
def test_seeds_are_a_number_or_a_list(text: str, seeds: object) -> None:
    field = options_of(SweepOptions)["seeds"]
    if seeds is None:
        with pytest.raises(InputError, match="it must be a number of seeds"):
            field.read(text)
    else:
        assert field.read(text) == seeds


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("3", int | None, 3),
        (None, int | None, None),
        ("none", str | None, "none"),
        (Path("a/b"), str | None, "a/b"),
        (range(3), tuple[int, ...], (0, 1, 2)),
        ("0.5", float, 0.5),
        (3, int | tuple[int, ...], 3),
        ([3, 4], int | tuple[int, ...], (3, 4)),
    ],
)
def test_values_are_brought_to_their_type(value: object, hint: object, expected: object) -> None:
    found = Field("x", hint, None, Option("")).convert(value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "allowed"),
    [
        ("ten", int | None, "a whole number"),
        (2.5, int, "a whole number"),
        ("inf", float, "a number"),
        (None, int, "a whole number"),
        (3, str | None, "text"),
        ("0,x", tuple[int, ...], "whole numbers separated by commas"),
    ],
)
def test_values_of_another_type_are_refused(value: object, hint: object, allowed: str) -> None:
    with pytest.raises(InputError, match=f"; it must be {allowed}\\.$"):
        Field("x", hint, None, Option("")).convert(value)


def test_every_option_says_what_it_means() -> None:
    for cls in Options.__subclasses__():
        for field in options_of(cls).values():
            text = field.option.help
            is_sentence = text[:1].isupper() and text.endswith(".")
            assert is_sentence, f"the help of {cls.__name__}.{field.name} is no sentence: {text!r}"


def test_every_default_is_allowed() -> None:
    for cls in Options.__subclasses__():
        for field in options_of(cls).values():
            if not field.is_required and field.default is not None:
                # Raises, and names the option, where the limits refuse the default.
                assert field.convert(field.default) == field.default
