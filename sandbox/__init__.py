"""Reading what strangers wrote, in a child process without privileges and with limits."""
