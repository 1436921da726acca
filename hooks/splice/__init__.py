"""Running the layers [a, b) of a decoder with the model's own forward."""
