"""Stages for collective operations, such as an all-reduce: what several ranks do together."""
