"""What every part needs to treat users alike: errors, output files, numbers as people read them."""
