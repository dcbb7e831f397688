"""Stacks as the capture gets them: finished, each distinct one once, and counted by where they end."""
