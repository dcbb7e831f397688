"""What a name is, and in which module of an address space an address lies."""
