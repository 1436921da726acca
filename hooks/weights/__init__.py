"""A model's weights in the pool: found, laid out, moved in, followed through changes, and their files."""
