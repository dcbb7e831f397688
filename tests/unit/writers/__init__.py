"""Tests of the output formats. TOTALS in these files says how to count the samples in a file of each format."""
