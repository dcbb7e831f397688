"""Captures to hand on: `iaprof archive`, and pseudonyms in place of names."""
