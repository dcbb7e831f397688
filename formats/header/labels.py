"""Labels of a recording, which its user gave with `record --label`: by these, captures are found and grouped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from iaprof.basics.clean import clean
from iaprof.basics.errors import UsageError

MEMBER = "labels"
"""The header member: an object of names and values."""
MOST = 64
LONGEST = 256  # characters of a value
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,62}")


def labels_of(header: dict[str, Any]) -> dict[str, str]:
    """The labels in a header (untrusted), cleaned; those that `record --label` would refuse are missing."""
    found = header.get(MEMBER)
    pairs = found.items() if isinstance(found, dict) else ()
    labels = {
        name: clean(value)[:LONGEST]
        for name, value in pairs
        if isinstance(name, str) and NAME.fullmatch(name) and isinstance(value, str)
    }
    return dict(list(labels.items())[:MOST])


def parse_labels(words: Sequence[str]) -> dict[str, str]:
    """Reads the values of `--label`: NAME=VALUE each.

    Raises:
        UsageError: one is something else.
    """
    labels: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not NAME.fullmatch(name):
            raise UsageError(f"--label takes NAME=VALUE, with letters, digits and _ . / - in the name: not '{word}'")
        if len(value) > LONGEST or not value.isprintable():
            raise UsageError(
                f"--label {name} has a value of more than {LONGEST} characters, or with control characters"
            )
        labels[name] = value
    if len(labels) > MOST:
        raise UsageError(f"a recording has {MOST} labels at most")
    return labels
