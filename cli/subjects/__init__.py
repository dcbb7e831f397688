"""What verbs show: a file for each subject, behind one interface (`subject.py`)."""
