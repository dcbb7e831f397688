"""What verbs and writers show of a report, each from a file of its own."""
