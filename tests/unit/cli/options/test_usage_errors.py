"""Command lines that make no sense: one sentence each, in the style of all errors, and exit code 2."""

from pathlib import Path

import pytest

from iaprof.gpu import vendors
from unit.capturing import capture
from unit.in_process import iaprof

BY = "kernel, function, line, instruction, reason, process, launcher, stack, operator, energy, transfer, wait"
REASONS = ", ".join(vendors.REASONS)
FORMATS = (
    "folded, html, svg, iaprof, json, perfetto, chrome, firefox, flamescope, speedscope, pprof, otlp, csv, parquet"
)
NO_EFFECT = "{} filters stalls and has no effect with {}: leave out one of them"
SEE = "'iaprof {verb} --help' lists what it takes"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nothing", "there is no command 'nothing': 'iaprof --help' lists the commands"),
        ("reprot", "there is no command 'reprot': did you mean report?"),
        ("help reprot", "there is no command 'reprot': did you mean report?"),
        ("--version=3", "--version takes no value: 'iaprof --help' lists what it takes"),
        ("report --form=html", "there is no option --form: did you mean --format?"),
        ("report -n", f"there is no option -n: {SEE}"),
        ("report --pid", f"--pid needs a value: {SEE}"),
        ("top -n x", f"--limit takes a whole number: {SEE}"),
        ("top --interval x", f"--interval takes a number: {SEE}"),
        ("devices --json=3", f"--json takes no value: {SEE}"),
        ("import", f"FILE is missing: {SEE}"),
        ("diff", f"BEFORE is missing: {SEE}"),
        ("archive", f"--output is missing: {SEE}"),
        ("info a b", f"unexpected argument b: {SEE}"),
        ("info a b c", f"unexpected arguments b c: {SEE}"),
        ("archive -o x --symbols al", "--symbols takes needed, all, not 'al': did you mean all?"),
        ("top --by kernal", f"--by takes {BY}, not 'kernal': did you mean kernel?"),
        ("report --reason sbidd", f"--reason takes {REASONS}, not 'sbidd': did you mean sbid?"),
        ("report --format=htlm", f"--format takes {FORMATS}, not 'htlm': did you mean html?"),
        ("query --format xlm", "--format takes table, json, csv, parquet, not 'xlm'"),
        ("report --json -o x.html", "--json and -o x.html contradict each other: leave one of them out"),
        ("report --format svg -o x.html", "--format=svg and -o x.html contradict each other: leave one of them out"),
        ("top --json -o x.csv", "--json and -o x.csv contradict each other: leave one of them out"),
        ("top --json -o x.html", "--json and -o x.html contradict each other: leave one of them out"),
        ("query --json -o x.csv", "--json and -o x.csv contradict each other: leave one of them out"),
        ("report --waits --kernel x", NO_EFFECT.format("--kernel", "--waits")),
        ("report --waits --no-active", NO_EFFECT.format("--no-active", "--waits")),
        ("report --cpu-samples --reason sbid", NO_EFFECT.format("--reason", "--cpu-samples")),
        ("top --by wait --device 0", NO_EFFECT.format("--device", "--by wait")),
        ("annotate -o x.svg", "the name x.svg does not determine the format: end it in .txt or .json"),
    ],
)  # fmt: skip
def test_one_sentence(words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    capture(tmp_path / "iaprof.parquet")
    verb = words.split()[0]
    assert iaprof(*words.split()) == (2, "", f"iaprof: {said.format(verb=verb)}\n")


def test_without_words_the_commands_are_listed() -> None:
    done = iaprof()
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Usage: iaprof [OPTIONS] COMMAND [ARGS]...\n")
    assert "\n  record " in done.err


def test_help_of_a_command_is_its_option_help() -> None:
    assert iaprof("help", "top") == iaprof("top", "--help")
    assert iaprof("help") == iaprof("--help")
    assert iaprof("help", "top").out.startswith("Usage: iaprof top [OPTIONS] [CAPTURE]...\n")


def test_the_list_of_commands_has_whole_sentences() -> None:
    lines = iaprof("--help").out.partition("Commands:\n")[2].splitlines()
    assert len(lines) == 17
    assert [line for line in lines if not line.endswith(".") or line.endswith("...") or len(line) > 80] == []


@pytest.mark.parametrize(
    ("verb", "usage", "arguments"),
    [
        ("report", "[CAPTURE]...", ["CAPTURE"]),
        ("diff", "BEFORE [AFTER]", ["BEFORE", "AFTER"]),
        ("merge", "CAPTURE...", ["CAPTURE"]),
        ("import", "FILE...", ["FILE..."]),
        ("timeline", "[FILE]...", ["FILE..."]),
        ("archive", "[CAPTURE]", ["CAPTURE"]),
    ],
)
def test_help_begins_with_the_arguments_without_types_of_python(verb: str, usage: str, arguments: list[str]) -> None:
    found = iaprof(verb, "--help").out
    assert found.startswith(f"Usage: iaprof {verb} [OPTIONS] {usage}\n")
    section = found.partition("\nArguments:\n")[2].partition("\nOptions:\n")[0]
    assert [line.split()[0] for line in section.splitlines() if line[2:3].strip()] == arguments
    assert "<" not in section
