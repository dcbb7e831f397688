"""Who names an address: sources of names, and what they are asked for."""
