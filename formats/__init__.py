"""What files look like, in and out; pure: no device, no process."""
