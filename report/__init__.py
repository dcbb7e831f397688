"""Offline analysis of captures, on any machine: the join, GPU code, profiles, and the views that verbs show."""
