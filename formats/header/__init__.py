"""Members of a capture's header: reading them, and the sentences about them."""
