"""What was measured of this machine: the link, its traffic, and the performance record."""
