"""`iaprof calibrate`: finds the layout of a driver by running it without a GPU."""
