"""`iaprof check`: what recording needs of a machine, a file for each subject.

Libraries, processes and their names may belong to anyone, and we may be root: reads are bounded, only regular files are
read, and names are cleaned where they are printed.
"""
