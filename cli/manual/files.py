"""The files that the build installs below a prefix such as /usr: man pages and completions."""

from __future__ import annotations

from typing import Any

from iaprof.cli.manual.commands import commands
from iaprof.cli.manual.completions import bash_completion, fish_completion, zsh_completion
from iaprof.cli.manual.man import man_page, page_name


def files(app: Any, version: str, date: str) -> dict[str, str]:
    """Returns the text of each file, by its path below the prefix.

    Args:
        app: the command, as typer has it.
        version: of iaprof.
        date: of the man pages, `2026-11-25`.
    """
    top, *verbs = commands(app)
    found = {f"share/man/man1/{page_name(each)}.1": man_page(each, version, date, verbs) for each in (top, *verbs)}
    found["share/bash-completion/completions/iaprof"] = bash_completion(verbs, top)
    found["share/zsh/site-functions/_iaprof"] = zsh_completion(verbs, top)
    found["share/fish/vendor_completions.d/iaprof.fish"] = fish_completion(verbs, top)
    return found
