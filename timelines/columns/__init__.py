"""Tables of events as columns, which take as little memory as their values allow."""
