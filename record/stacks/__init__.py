"""Stacks as the capture gets them: completed, each distinct one once, and counted by how they end."""
