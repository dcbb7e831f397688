# SPDX-License-Identifier: Apache-2.0
"""Runs tests of dpnp's own; runs in Python of scripts/test-programs. Nothing is really computed there, so most fail.

Arguments: of pytest.
"""

import sys

import pytest

WITHOUT = "not Convolve and not Correlate"  # which use a library of oneMKL's that is not here, and end the process

pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", "-k", WITHOUT, *sys.argv[1:]])
