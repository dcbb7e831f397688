"""`iaprof top --live`: what is recorded, shown while it is recorded."""
