"""The formats of files, records and outputs, in and out: no access to devices or processes."""
