"""Names for addresses: in which module each address lies, and the symbolizers that name it."""
