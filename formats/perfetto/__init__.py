"""Writing Perfetto's format: whole columns of messages, and packets of them."""
