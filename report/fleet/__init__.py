"""Reports of many captures: each becomes a small profile, which is kept, and these are added up."""
