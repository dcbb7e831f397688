"""What the members of a capture's header say, and the sentences made of them."""
