"""Options shared by several verbs, and parsers of option values."""
