"""Perfetto's traces: the format's messages, read whole columns at a time, and the state that its packets share."""
