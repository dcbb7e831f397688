# SPDX-License-Identifier: Apache-2.0
"""Runs tests of dpnp's own; runs in Python of scripts/test-programs. Nothing is really computed there, so most fail.

Arguments: of pytest.
"""

import sys

import pytest

# -s: who captures what a test prints, does so with files that it keeps
pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", *sys.argv[1:]])
