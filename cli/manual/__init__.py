"""Man pages and shell completions, made of the same texts as help; the build installs them."""
