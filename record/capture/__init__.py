"""What a recording is written to: journal, spool, and the capture that is made of a spool."""
