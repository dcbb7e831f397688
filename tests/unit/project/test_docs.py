"""The documentation names what exists, and captures of every format version stay readable."""

import re
from pathlib import Path

import pyarrow as pa
import pytest
import typer.main

from iaprof.cli.main import app
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import FORMAT, KINDS
from iaprof.formats.writers.registry import FORMATS
from iaprof.gpu.intel import records
from iaprof.gpu.intel.generations import LAYOUTS as KNOWN_LAYOUTS

ROOT = Path(__file__).resolve().parents[3]
CAPTURES = ROOT / "tests" / "data" / "captures"
PAGES = {path.stem: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
OPTIONS = {
    verb: [{*option.opts, *option.secondary_opts} for option in command.params if option.param_type_name == "option"]
    for verb, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
}
"""The names of each option of each verb."""
OF_OTHERS = {
    "--include",  # rclone
    "--cgroupns", "--name", "--network", "--privileged", "--restart", "--now",  # docker, systemctl
    "--no-build-isolation", "--no-deps", "--require-hashes", "--requirement",  # pip
    "--data-binary", "--fail", "--feature-gates",  # curl, OpenTelemetry's collector
    "--local-directory", "--no-dashboard", "--tls-ca-file", "--tls-cert", "--tls-key",  # Dask
    "--build-id", "--index-url", "--interpreted-frames-native-stack", "--mount", "--one-way", "--perf-basic-prof",
    "--seconds", "--threads", "--torch", "--transfer-bandwidth", "--wait-file",
}  # fmt: skip
"""Options of other programs that the documentation names."""
OF_ACELYZER = {
    "-i", "--input", "--version", "-o", "--output", "-C", "--counter", "-c", "--compiler_log",
    "--compiler_info", "--freq", "--event_filter", "--event_limit", "-F", "--filter", "--flow", "-R",
    "--build_coll_event", "--comm_summarize_seq", "--flex_ts_fix", "--drop_globals", "--keep_prep",
    "--keep_names", "--power-stats", "-k", "--skip_events", "-M", "--no_mp_sync", "-S", "--use_mp_sync_v2",
    "-O", "--overlap", "--max_tid_streams", "-s", "--split_events", "-t", "--no_stats", "--tb", "--disable_tb",
    "-P", "--profile", "-I", "--intermediate", "-f", "--format", "--time_unit", "--disable_file", "-D",
    "--loglevel", "-V", "--verify", "--ignore_crit", "-T", "--sync_to_dev", "--autopilot_data",
    "--disable_input_warnings", "--freq_scaling",
}  # fmt: skip
"""Options of the AIU Trace Analyzer, in both of the versions that docs/timeline.md is about."""
FORMAT_PAGE = (ROOT / "docs" / "capture-format.md").read_text()


def test_each_option_of_the_aiu_trace_analyzer_is_in_the_table_of_equivalents() -> None:
    section = next(part for part in PAGES["timeline"].split("\n## ") if part.startswith("Options of acelyzer"))
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    named = {word for row in rows for code in re.findall(r"`([^`]+)`", row) for word in re.findall(r"^--?[\w-]+", code)}
    assert named >= OF_ACELYZER


@pytest.mark.parametrize("kind", KINDS)
def test_every_column_of_a_kind_is_described_with_its_type(kind: str) -> None:
    section = re.split(r"^## ", FORMAT_PAGE, flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(f"`{kind}`"))
    described = {
        name: row.split("|")[2].strip()
        for row in text.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert set(described) == {field.name for field in KINDS[kind]}
    for field in KINDS[kind]:
        type_ = str(field.type).replace("double", "float64")
        is_list = isinstance(field.type, pa.ListType)
        assert described[field.name] == (f"list of {field.type.value_type}" if is_list else type_), field.name


def test_every_format_stays_readable() -> None:
    captures = set(CAPTURES.glob("format-*.parquet"))
    assert captures == {CAPTURES / f"format-{number}.parquet" for number in range(1, FORMAT + 1)}
    for path in captures:
        reader = CaptureReader(path)
        layout = KNOWN_LAYOUTS[reader.header["streams"][0]["layout"]]
        assert reader.table("stall")["w0"].combine_chunks().flatten().to_numpy().size == 200
        assert layout is records.XE2
        assert len(reader.table("launch")) == reader.header["totals"]["launches"] == 40


def test_the_header_of_a_real_capture_is_described() -> None:
    header = CaptureReader(CAPTURES / f"format-{FORMAT}.parquet").header
    names = set(header) | {name for entry in header["streams"] for name in entry}
    names |= set(header["totals"]) | set(header["cost"]) | set(header["host"]) | set(header["clock"])
    missing = {name for name in names if f"`{name}`" not in FORMAT_PAGE}
    assert not missing


def test_tests_that_the_threat_model_names_exist() -> None:
    security = (ROOT / "docs" / "security.md").read_text()
    sources = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    files = set(re.findall(r"`(test_\w+\.py)`", security))
    assert files
    assert files <= {path.name for path in sources}
    for name in re.findall(r"`(test_\w+)`", security):
        assert any(f"def {name}(" in source for source in sources.values()), name


def test_links_between_pages_lead_somewhere() -> None:
    links = 0
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+\.md)\)", page.read_text()):
            assert (page.parent / target).is_file(), (page.name, target)
            links += 1
    assert links > len(PAGES)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_to_sections_lead_to_a_heading() -> None:
    links = 0
    for page in [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            assert anchor in anchors(page.parent / target if target else page), (page.name, target, anchor)
            links += 1
    assert links > 50


def test_the_readme_lists_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in readme] == []


def test_every_format_is_in_the_page_about_report() -> None:
    page = (ROOT / "docs" / "report.md").read_text().lower()
    for name, format_ in FORMATS.items():
        assert name in page
        assert all(f"`{extension}`" in page for extension in format_.extensions)


def code_lines(page: str) -> list[str]:
    """What a page has as code, a line each; a command that goes on in the next line is one."""
    found = re.finditer(r"^ {4,}(.*)|`([^`\n]+)`", page.replace("\\\n", " "), flags=re.MULTILINE)
    return [block or inline for block, inline in (each.groups() for each in found)]


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))


@pytest.mark.parametrize("page", PAGES)
def test_every_option_that_a_page_names_exists(page: str) -> None:
    known = {name for options in OPTIONS.values() for names in options for name in names}
    for line in code_lines(PAGES[page]):
        calls = re.findall(r"(?:^|[|;&(] *|sudo |\$ )iaprof ([a-z]\w*)((?:(?! -- |[|;&#)]).)*)", line)
        for verb, words in calls:
            assert verb in OPTIONS, line
            assert options_in(words) <= {"--help"}.union(*OPTIONS[verb]), line
        if not calls:
            long = {name for name in options_in(line) if name.startswith("--")}
            assert long <= known | OF_OTHERS | OF_ACELYZER | {"--help", "--version"}, line


def test_the_options_of_other_programs_are_still_named() -> None:
    named = options_in("\n".join(line for page in PAGES.values() for line in code_lines(page)))
    assert named >= OF_OTHERS
    assert not OF_OTHERS & {name for options in OPTIONS.values() for names in options for name in names}


@pytest.mark.parametrize("verb", OPTIONS)
def test_every_option_of_a_verb_is_named(verb: str) -> None:
    """On its page, on one that this links to, or on the page of another verb that has the same option."""
    for names in OPTIONS[verb]:
        own = {verb, *re.findall(r"\]\((\w[\w-]*)\.md", PAGES[verb])}
        pages = own | {other for other, options in OPTIONS.items() if names in options}
        assert any(names & options_in(line) for page in pages & PAGES.keys() for line in code_lines(PAGES[page])), names
