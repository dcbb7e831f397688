"""The interactive view of a capture's stalls in a terminal, made with textual."""
