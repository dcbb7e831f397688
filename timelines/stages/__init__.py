"""The stages of a time line, a file for each subject. A stage is a function that changes a Trace."""
