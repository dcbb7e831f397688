"""What a GPU is: a package for each vendor behind one interface (vendor.py). vendors.py lists the vendors."""
