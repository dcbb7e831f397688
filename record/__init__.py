"""What runs on the recorded machine: sources, the loop that calls them, the spool, and the capture made of it."""
