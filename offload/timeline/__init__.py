"""A run as a picture: recorded, thinned, written down."""
