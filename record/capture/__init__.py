"""Journal, spool, rotation, and the capture that is made of a spool."""
