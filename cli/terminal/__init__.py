"""What verbs print: tables, progress, summaries."""
